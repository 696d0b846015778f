// Which struct of a header is its policy. Reads C++ only as far as braces, comments and literals.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

struct PolicyStruct {
  std::string name;  ///< qualified: kvlab::Peak
  unsigned line;     ///< where it begins, from 1
};

/// The struct in which kInfo is declared; where none is, the last one that stands in a namespace,
/// so that the compiler can say what it lacks. `path` names the header in errors. Throws
/// std::invalid_argument: no struct, or several with a kInfo.
PolicyStruct find_policy_struct(std::string_view text, std::string_view path);

}  // namespace kvlab
