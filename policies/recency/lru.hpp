// lru: evicts the least recently requested token. A token is requested when at least one query head
// of its group gives it at least tau times the largest probability of the row (tau = 0.01 by
// default).
//
// The idea is from Scissorhands ("inspired by ... least recent usage", Liu et al. 2023, algorithm
// 2). Deliberate differences from it:
//   - Scissorhands counts requests (a probability above 1/t, where t is the number of tokens so
//     far) in a window of 400 queries and drops half of the budget at once; lru keeps the position
//     of the last request and evicts one token per step;
//   - Scissorhands protects the last 10 tokens; lru protects tokens only with settings such as
//     lru:sinks=4:recent=50%;
//   - each KV head keeps one set of tokens; every layer has the same budget.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Lru {
  static constexpr PolicyInfo kInfo{
      .name = "lru",
      .summary = "evicts the least recently requested token",
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
