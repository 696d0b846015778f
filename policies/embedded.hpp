// The policy headers as text. They are part of the program, so that it can compile a policy at run
// time without the source tree.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct EmbeddedText {
  std::string_view path;  ///< path in the project, such as policies/policy.hpp
  std::string_view text;
};

/// The headers that a policy may include, and the headers that convert a policy to an entry.
std::span<const EmbeddedText> policy_headers();

}  // namespace kvlab
