// clock: CLOCK, also called second chance. A hand moves over the tokens in the order in which they
// were appended and evicts the first one that was not requested since the hand passed it last. A
// new token takes the place of the evicted one, just behind the hand.
//
// Corbato 1968, "A Paging Experiment with the Multics System". It approximates LRU without moving a
// token when it is requested. SGLang's HiSparse uses CLOCK in its kernel for several decoding
// steps.
#pragma once

#include "policies/recency/hand.hpp"

namespace kvlab {

struct Clock : HandPolicy {
  static constexpr PolicyInfo kInfo{
      .name = "clock",
      .summary =
          "evicts the next token that was not requested since the clock hand passed it (CLOCK)",
      .citation = "Corbato 1968, A Paging Experiment with the Multics System",
      .needs = Needs::requests};

  static constexpr void evicted(Slot& slot, const Eviction& eviction, const Params&) {
    if (eviction.is_new) {
      slot.place = Hand::place_of(eviction.rank);
      slot.is_passed = 1;
    } else {
      slot.move_to(eviction.rank);
    }
  }
};

}  // namespace kvlab
