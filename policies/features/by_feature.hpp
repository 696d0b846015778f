// Hooks of the policies that rank tokens by one feature alone.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct LowestEvictedFirst {
  struct Params {};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr double rank(const Slot&, Token token, const Params&, const Step&) {
    return static_cast<double>(token.feature[0]);
  }
};

struct HighestEvictedFirst : LowestEvictedFirst {
  static constexpr double rank(const Slot&, Token token, const Params&, const Step&) {
    return -static_cast<double>(token.feature[0]);
  }
};

}  // namespace kvlab
