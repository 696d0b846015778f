// The hooks that policies share which order tokens by one column alone.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct LowestLeaves {
  struct Params {};
  struct Slot {};

  static constexpr void admit(Slot&, Token, const Params&, const Step&) {}
  static constexpr double rank(const Slot&, Token token, const Params&, const Step&) {
    return static_cast<double>(token.column[0]);
  }
};

struct HighestLeaves : LowestLeaves {
  static constexpr double rank(const Slot&, Token token, const Params&, const Step&) {
    return -static_cast<double>(token.column[0]);
  }
};

}  // namespace kvlab
