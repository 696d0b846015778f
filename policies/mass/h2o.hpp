// h2o: heavy hitters. Evicts the token with the lowest accumulated attention; half of the budget is
// for recent tokens.
//
// Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", algorithm 1 and section 4.1. Deliberate
// differences from the paper and from the authors' five released versions:
//   - probabilities are summed exactly (Q32.32); theirs are summed in fp16, and the sums saturate;
//   - each KV head keeps one set of tokens, chosen by the sum of the masses of its query heads;
//   - the appended token counts as recent, so it is never evicted first (algorithm 1 allows that);
//   - an evicted token does not return (in the authors' simulation, which masks tokens, it returns
//     after one step);
//   - at equal mass, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

/// The state and hooks that `h2o` and `streaming_h2o` share: accumulated attention.
struct AccumulatedMass {
  struct Params {};
  struct Slot {
    std::uint64_t mass;  // Q32.32
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.mass = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.mass += seen.mass;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.mass;
  }
};

struct H2O : AccumulatedMass {
  static constexpr PolicyInfo kInfo{
      .name = "h2o",
      .summary = "evicts the token with the least accumulated attention",
      .citation = "Zhang et al. 2023, H2O, algorithm 1 (arXiv:2306.14048)",
      .needs = Needs::mass,
      .recent = percent(50)};
};

}  // namespace kvlab
