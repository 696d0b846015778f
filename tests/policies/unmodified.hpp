// A policy without the modifiers of its own, for tests of the plain rule and of other modifiers.
#pragma once

#include <string>

#include "policies/catalogue.hpp"
#include "policies/modifiers/text.hpp"

namespace kvlab::test {

/// "snapkv:once=no:smooth=0" of "snapkv".
inline std::string unmodified(std::string policy) {
  for (const std::string& off : modifier_texts({}, parse_policy(policy).entry->info.modifiers))
    policy += ":" + off;
  return policy;
}

}  // namespace kvlab::test
