// sieve: SIEVE. A hand moves from the oldest to the newest token and evicts the first one that was
// not requested since the hand passed it last. New tokens are added at the newest end, wherever the
// hand is. So the hand soon reaches tokens that are never requested again, and evicts them early.
//
// Zhang et al. 2024, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web
// Caches" (NSDI), algorithm 1.
#pragma once

#include "policies/recency/hand.hpp"

namespace kvlab {

struct Sieve : HandPolicy {
  static constexpr PolicyInfo kInfo{
      .name = "sieve",
      .summary =
          "evicts the next token that was not requested since the hand passed it; new tokens are "
          "placed last (SIEVE)",
      .citation = "Zhang et al. 2024, SIEVE (NSDI), algorithm 1",
      .needs = Needs::requests};

  static constexpr void evicted(Slot& slot, const Eviction& eviction, const Params&) {
    if (!eviction.is_new)
      slot.move_to(eviction.rank);
    else if (eviction.was_newest)
      slot.is_passed = 1;  // no token is ahead of the hand: it goes on from the oldest one
  }
};

}  // namespace kvlab
