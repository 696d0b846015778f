// Runs commands in this process, from the line that a user would type.
#pragma once

#include <boost/program_options/parsers.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/error_of.hpp"
#include "tools/command.hpp"

namespace kvlab::test {

inline const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

/// Splits a line as a shell would.
inline std::vector<std::string> split_words(const std::string& line) {
  return boost::program_options::split_unix(line);
}

/// Runs `line`, the name of a command and its arguments. Returns the exit code.
inline int call(const std::string& line) {
  const std::vector<std::string> words = split_words(line);
  for (const Command& command : all_commands())
    if (command.name == words.at(0)) return run_command(command, {words.begin() + 1, words.end()});
  throw std::logic_error("no command " + words[0]);
}

/// The error message of a command that is refused; "" if it runs.
inline std::string refusal(const std::string& line) {
  return error_of<std::exception>([&] { call(line); });
}

}  // namespace kvlab::test
