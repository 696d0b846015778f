// The hooks that policies share which order tokens by one column alone.
#pragma once

#include "policies/ordered.hpp"
#include "policies/policy.hpp"

namespace kvlab {

struct LowestLeaves {
  struct Params {};
  struct Slot {};

  static constexpr void admit(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step&) {
    return ordered(token.column[0]);
  }
};

struct HighestLeaves : LowestLeaves {
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step&) {
    return ordered(-token.column[0]);
  }
};

}  // namespace kvlab
