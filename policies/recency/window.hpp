// window: keeps the most recent tokens ("Local" in H2O, "window attention" in StreamingLLM).
//
// The tokens that are kept are the same as in these papers. Deliberate difference: keys stay at
// their original positions. StreamingLLM's baseline also exists with cache positions (--positions
// cache).
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Window {
  static constexpr PolicyInfo kInfo{
      .name = "window",
      .summary = "evicts the oldest token",
      .citation = "Beltagy et al. 2020, Longformer, section 3.1 (arXiv:2004.05150)",
      .order = Order::nested,
      .oldest_first = true};
  struct Params {};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step&) {
    return token.position;
  }
};

}  // namespace kvlab
