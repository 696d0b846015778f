// The policy headers as text. kvlab carries them, so it can compile a policy at run time without
// its source tree.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct EmbeddedText {
  std::string_view path;  ///< path in the project: policies/policy.hpp
  std::string_view text;
};

/// The headers that a policy may include, and those that convert a policy to an entry.
std::span<const EmbeddedText> policy_headers();

}  // namespace kvlab
