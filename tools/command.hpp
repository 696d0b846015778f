// A subcommand of `kvlab`. Each has a file tools/commands/<name>.cpp and a line in commands.cpp.
#pragma once

#include <boost/program_options.hpp>
#include <cstdint>
#include <string>
#include <vector>

// Most kinds of option are compiled only once, in options.cpp.
extern template class boost::program_options::typed_value<bool>;
extern template class boost::program_options::typed_value<double>;
extern template class boost::program_options::typed_value<std::int64_t>;
extern template class boost::program_options::typed_value<std::string>;

namespace kvlab {

namespace po = boost::program_options;

struct Command {
  std::string name, summary;
  std::string usage;    ///< after "kvlab NAME "
  std::string example;  ///< a working command line, shown by --help
  void (*add_options)(po::options_description&);
  /// The option that positional arguments go to, if any (such as "trace-args"). A count of -1
  /// allows any number.
  std::string positional = "";
  /// Returns the exit code: 0, or 1 if a check failed. Throws std::exception for bad input.
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

/// Parses `words` (without the command's name) with the command's options and runs it, or prints
/// its help for --help. Returns the exit code. Throws std::exception for bad input.
int run_command(const Command& command, const std::vector<std::string>& words);

/// Runs the `kvlab` program: prints errors to standard error, handles signals, and never throws.
/// Returns the exit code. Call it once in a process.
int kvlab_main(int argc, char** argv);

/// All commands, in the order of the help.
std::vector<Command> all_commands();

}  // namespace kvlab
