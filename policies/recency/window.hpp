// window: the most recent tokens ("Local" in H2O, "window attention" in StreamingLLM).
//
// Deliberate differences: none of score; positions are original, where StreamingLLM's own baseline
// also comes at cache positions (--positions cache gives it).
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Window {
  static constexpr PolicyInfo kInfo{
      .name = "window",
      .summary = "the oldest is evicted first",
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
