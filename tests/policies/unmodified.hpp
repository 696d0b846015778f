// A policy without its default modifiers, for tests of the plain rule and of other modifiers.
#pragma once

#include <string>

#include "policies/catalogue.hpp"
#include "policies/modifiers/text.hpp"

namespace kvlab::test {

/// Turns off the default modifiers of `policy`, except those that `others` sets, and appends
/// `others`. "snapkv" becomes "snapkv:once=no:smooth=0"; with ":smooth=3:every=4" it becomes
/// "snapkv:once=no:smooth=3:every=4".
inline std::string unmodified(std::string policy, const std::string& others = "") {
  for (const std::string& off : modifier_texts({}, parse_policy(policy).entry->info.modifiers))
    if (others.find(":" + off.substr(0, off.find('='))) == std::string::npos) policy += ":" + off;
  return policy + others;
}

}  // namespace kvlab::test
