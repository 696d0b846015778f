// Runs a command on its words, as main does and as the demo does.
#pragma once

#include <string>
#include <vector>

#include "tools/command.hpp"

namespace kvlab {

/// Parses `words` (without the command's name) by the command's own options and runs it; with
/// --help, prints its help. Returns the exit code. Throws std::exception for bad input.
int run_command(const Command& command, const std::vector<std::string>& words);

}  // namespace kvlab
