// The policies' headers as text, so that a policy can be compiled at run time wherever kvlab is.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct EmbeddedText {
  std::string_view path;  ///< in the project: policies/policy.hpp
  std::string_view text;
};

/// What a policy's header may include, and what turns it into an entry.
std::span<const EmbeddedText> policy_headers();

}  // namespace kvlab
