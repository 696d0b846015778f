// Runs commands as a user types them.
#pragma once

#include <stdexcept>
#include <string>

#include "tests/error_of.hpp"
#include "tools/command.hpp"

namespace kvlab::test {

inline const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

/// Runs `line` (the command's name and its arguments), split as a shell would.
inline int call(const std::string& line) {
  const std::vector<std::string> words = po::split_unix(line);
  for (const Command& command : all_commands())
    if (command.name == words.at(0)) return run_command(command, {words.begin() + 1, words.end()});
  throw std::logic_error("no command " + words[0]);
}

/// The message that refuses the command; empty if it runs.
inline std::string refusal(const std::string& line) {
  return error_of<std::exception>([&] { call(line); });
}

}  // namespace kvlab::test
