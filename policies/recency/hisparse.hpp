// hisparse: the LRU order of HiSparse (SGLang, vLLM), also `lru:preset=hisparse`. After each step,
// the order from the first victim to the last is: tokens that the step did not request, tokens that
// it fetched, tokens that it requested and found in the buffer. Tokens that were found keep their
// order among themselves, which differs from textbook LRU.
//
// Written from the description of SGLang's hisparse.cuh. Deliberate difference: the query's own
// token counts as fetched. HiSparse gives this token a slot outside the order, and the next token
// takes over this slot.
#pragma once

#include "policies/recency/hand.hpp"

namespace kvlab {

struct HiSparse {
  static constexpr PolicyInfo kInfo{.name = "hisparse",
                                    .summary =
                                        "evicts the least recently requested token; tokens "
                                        "requested together keep their order (HiSparse)",
                                    .citation = "SGLang, jit_kernel/csrc/hisparse.cuh",
                                    .needs = Needs::requests};
  struct Params {};
  struct Slot {
    std::uint64_t key;  // last request, from high to low bits: its step, found or fetched, order
    std::uint32_t order, appended_at;
  };

  static constexpr void append(Slot& slot, Token token, const Params&, const Step& step) {
    slot = {key_of(step.now, false, token.position), 0, step.now};
  }
  static constexpr void reorder(Slot& slot, std::uint32_t order, const Params&, const Step&) {
    slot.order = order;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&,
                                const Step& step) {
    if (seen.requests > 0 && slot.appended_at != step.now)
      slot.key = key_of(seen.last_request, true, slot.order);
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.key;
  }

 private:
  static constexpr std::uint64_t key_of(std::uint32_t step, bool found, std::uint32_t order) {
    return Hand::cap(step) << (Hand::kBits + 1) | std::uint64_t{found} << Hand::kBits |
           Hand::cap(order);
  }
};

}  // namespace kvlab
