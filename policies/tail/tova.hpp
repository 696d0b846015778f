// tova: evicts the token to which the last query attends least.
//
// Oren et al. 2024, "Transformers are Multi-State RNNs", section 3.2, the policy TOVA. Deliberate
// differences from the authors' code:
//   - each KV head keeps one set of tokens, by the sum over its group's query heads; the authors'
//     code keeps one set for a whole layer, by the mean over all of its heads;
//   - tokens are evicted before the append, not after, so the budget includes the query's token;
//   - at equal rank, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Tova {
  static constexpr PolicyInfo kInfo{
      .name = "tova",
      .summary = "evicts the token with the least attention from the last query",
      .citation = "Oren et al. 2024, TOVA (arXiv:2401.06104)",
      .needs = Needs::mass,
      .weighted = true};
  struct Params {};
  struct Slot {
    std::uint64_t mass;  // Q32.32, from the last query only
  };

  // Of the queries of one append, only the youngest counts.
  static constexpr float weight(std::uint32_t age, const Params&) { return age == 0 ? 1.0f : 0.0f; }
  static constexpr std::uint32_t tail(const Params&) { return 1; }

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.mass = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.mass = seen.mass;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.mass;
  }
};

}  // namespace kvlab
