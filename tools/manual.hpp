// What other programs know of the command line, made from the options themselves.
#pragma once

#include <string>

namespace kvlab {

/// kvlab(1), in troff's man macros.
std::string man_page();

/// A script that completes commands and options: of bash, zsh or fish. Throws std::invalid_argument
/// for another shell.
std::string completion_script(const std::string& shell);

}  // namespace kvlab
