// Finds the policy struct of a header. Parses only braces, comments and literals of C++.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

struct PolicyStruct {
  std::string name;  ///< qualified: kvlab::Peak
  unsigned line;     ///< line at which it begins, from 1
};

/// Finds the struct that declares kInfo. If there is none, returns the last struct in a namespace,
/// so that the compiler can report which members are missing. `path` names the header in errors.
/// Throws std::invalid_argument if there is no struct, or if several declare kInfo.
PolicyStruct find_policy_struct(std::string_view text, std::string_view path);

/// A policy's header with old names (old_names.hpp) replaced by the current ones. Line numbers stay
/// the same. Text in quotes is not changed, except for the paths of #include.
std::string current_header(std::string_view header);

}  // namespace kvlab
