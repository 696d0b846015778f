// full: keeps the whole cache. It is the baseline for every other policy.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Full {
  static constexpr PolicyInfo kInfo{.name = "full",
                                    .summary = "never evicts",
                                    .citation = "the full cache",
                                    .order = Order::nested,
                                    .evicts = false};
  struct Params {};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step&) {
    return token.position;
  }
};

}  // namespace kvlab
