// h2o_mean: evicts the token with the lowest attention per query: accumulated attention divided by
// the number of queries that could see the token.
//
// Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", appendix B.2, which tries this and finds it worse
// than the sum. Several public codebases named "H2O" use it, because a sum favours old tokens.
// Deliberate differences:
//   - the same differences as for h2o: exact sums, one set of tokens for each KV head, one eviction
//     per step;
//   - the mean is rounded down to units of 2^-48; at equal mean, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct H2OMean {
  static constexpr PolicyInfo kInfo{
      .name = "h2o_mean",
      .summary = "evicts the token with the least attention per query that saw it",
      .citation = "Zhang et al. 2023, H2O, appendix B.2 (arXiv:2306.14048)",
      .needs = Needs::mass,
      .recent = percent(50)};
  struct Params {};
  struct Slot {
    std::uint64_t mass;  // Q32.32
    std::uint32_t queries;
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) {
    slot.mass = 0;
    slot.queries = 0;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.mass += seen.mass;
    slot.queries += seen.queries;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    const double queries = slot.queries > 0 ? slot.queries : 1;
    return static_cast<std::uint64_t>(static_cast<double>(slot.mass) / queries * 65536.0);
  }
};

}  // namespace kvlab
