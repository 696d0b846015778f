#include "tools/run_command.hpp"

#include <fmt/core.h>

#include <iostream>

namespace kvlab {
namespace {

void print_help(const Command& command, const po::options_description& options) {
  fmt::print("{}\n\nUsage: kvlab {} {}\n\n", command.summary, command.name, command.usage);
  std::cout << options << "\nExample: " << command.example << "\n";
}

po::variables_map parse(const Command& command, const po::options_description& options,
                        const std::vector<std::string>& words) {
  po::positional_options_description positional;
  if (!command.positional.empty()) positional.add(command.positional.c_str(), -1);
  po::variables_map values;
  // No guessing of abbreviated options: a slip should be named, not completed.
  const int style = po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
  po::store(
      po::command_line_parser(words).options(options).positional(positional).style(style).run(),
      values);
  if (!values.count("help")) po::notify(values);
  return values;
}

}  // namespace

int run_command(const Command& command, const std::vector<std::string>& words) {
  po::options_description options("Options", 100);
  options.add_options()("help,h", "this text");
  command.add_options(options);
  const po::variables_map values = parse(command, options, words);
  if (values.count("help")) {
    print_help(command, options);
    return 0;
  }
  return command.run(values);
}

}  // namespace kvlab
