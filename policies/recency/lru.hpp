// lru: least recently requested. A token is requested when some query head of its group gives it at
// least tau times the probability of the row's largest entry (tau = 0.01 by default).
//
// The idea is Scissorhands' ("inspired by ... least recent usage", Liu et al. 2023, algorithm 2).
// Deliberate differences from it:
//   - theirs counts requests (probability over 1/t) in a window of 400 queries and drops half of
//     the budget at once; ours keeps the last request and evicts one token a step;
//   - theirs protects the last 10 tokens; ours takes protected tokens on request (lru:sinks=4:recent=50%);
//   - per KV head, every layer, the same budget.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Lru {
  static constexpr PolicyInfo kInfo{
      .name = "lru",
      .summary = "the least recently requested is evicted first",
      .citation = "after Liu et al. 2023, Scissorhands, algorithm 2 (arXiv:2305.17118)",
      .needs = Needs::requests};
  struct Params {};
  struct Slot {
    std::uint32_t last_request;
  };

  static constexpr void append(Slot& slot, Token token, const Params&, const Step&) {
    slot.last_request = token.position;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    if (seen.requests > 0) slot.last_request = seen.last_request;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.last_request;
  }
};

}  // namespace kvlab
