// A subcommand of `kvlab`. Each has a file tools/commands/<name>.cpp and a line in commands.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tools/option_table.hpp"

namespace kvlab {

inline constexpr int kBadInput = 2;  // exit code

struct Command {
  std::string name, summary;
  std::string usage;            ///< what --help shows after "kvlab NAME "
  std::string example;          ///< a working command line, shown by --help
  std::string positional = "";  ///< the option that takes words without an option name; "": none

  /// Adds the options to the table. Returns the function to call after the table has filled the
  /// request. That function returns the exit code: 0, or 1 if a check failed. It throws
  /// std::exception for bad input.
  using Prepare = std::function<std::function<int()>(OptionTable&)>;
  Prepare prepare;
};

/// Makes the `prepare` of a command whose options fill a `Request`. `check` runs after the checks
/// that `add_options` adds; it may be null.
template <class Request>
Command::Prepare make_prepare(void (*add_options)(OptionTable&, Request&),
                              void (*check)(Request&, const GivenOptions&),
                              int (*run)(const Request&)) {
  return [=](OptionTable& table) {
    const auto request = std::make_shared<Request>();
    add_options(table, *request);
    if (check) table.check([=](const GivenOptions& given) { check(*request, given); });
    return [=] { return run(*request); };
  };
}

Command bench_command();
Command capture_command();
Command compare_command();
Command demo_command();
Command deploy_command();
Command eval_command();
Command export_command();
Command fidelity_command();
Command generate_command();
Command manual_command();
Command plan_command();
Command policies_command();
Command predict_command();
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
