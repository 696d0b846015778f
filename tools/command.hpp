// One subcommand of `kvlab`. Each lives in its own tools/commands/<name>.cpp and has one line in
// commands.cpp.
#pragma once

#include <boost/program_options.hpp>
#include <cstdint>
#include <string>
#include <vector>

// Most kinds of option, compiled once, in options.cpp.
extern template class boost::program_options::typed_value<bool>;
extern template class boost::program_options::typed_value<double>;
extern template class boost::program_options::typed_value<std::int64_t>;
extern template class boost::program_options::typed_value<std::string>;

namespace kvlab {

namespace po = boost::program_options;

struct Command {
  std::string name, summary;
  std::string usage;    ///< after "kvlab NAME "
  std::string example;  ///< one line that works, shown by --help
  void (*add_options)(po::options_description&);
  /// Positional arguments go to this option, if any ("trace-args", say); -1 count: any number.
  std::string positional = "";
  /// Returns the exit code: 0, or 1 where a check failed. Throws std::exception for bad input.
  int (*run)(const po::variables_map&);
};

Command allocate_command();
Command bench_command();
Command capture_command();
Command compare_command();
Command demo_command();
Command deploy_command();
Command eval_command();
Command fidelity_command();
Command generate_command();
Command manual_command();
Command policies_command();
Command replay_command();
Command report_command();
Command task_command();
Command trace_command();
Command tune_command();
Command verify_command();

/// Parses `words` (without the command's name) by the command's own options and runs it; with
/// --help, prints its help. Returns the exit code. Throws std::exception for bad input.
int run_command(const Command& command, const std::vector<std::string>& words);

/// The whole command, by the words that follow its name: messages to standard error, signals heard,
/// nothing thrown. Returns the exit code. Once in a process.
int kvlab_main(int argc, char** argv);

/// All of them, in the order of the help.
std::vector<Command> all_commands();

}  // namespace kvlab
