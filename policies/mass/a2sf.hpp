// a2sf: H2O with forgetting. Evicts the token with the lowest accumulated attention. Each query
// first multiplies the accumulated attention by `keep`.
//
// Jo and Shin 2024, "A2SF: Accumulative Attention Scoring with Forgetting Factor", section 3: the
// mass of token k after query n is the sum over q of keep^(n - q) * p(q, k). Deliberate differences
// from the paper and its code:
//   - the authors choose their forgetting factor alpha for each model; `keep` defaults to 0.98,
//     from measurements (docs/reference/policies.md);
//   - half of the budget is for recent tokens, and one token is evicted per step;
//   - each KV head keeps one set of tokens, by the sum of the masses of its query heads;
//   - an append of n queries multiplies the earlier mass by keep^n at once. The factor is rounded
//     to the nearest unit of 2^-32 and the product is rounded down, so old masses reach 0. With
//     integers, host and device give the same results;
//   - at equal mass, the older token is evicted.
#pragma once

#include "policies/fixed_point.hpp"
#include "policies/policy.hpp"

namespace kvlab {

struct A2sf {
  static constexpr PolicyInfo kInfo{
      .name = "a2sf",
      .summary =
          "evicts the token with the least accumulated attention, where old attention decays",
      .citation = "Jo and Shin 2024, A2SF, section 3 (arXiv:2407.20485)",
      .needs = Needs::mass,
      .weighted = true,
      .recent = percent(50)};
  struct Params {
    double keep;
  };
  static constexpr Param<Params> kParams[] = {
      {"keep", "factor by which accumulated attention decays at each query", &Params::keep, 0.98, 0,
       1}};
  struct Slot {
    std::uint64_t mass;  // Q32.32
  };

  static constexpr float weight(std::uint32_t age, const Params& params) {
    return age < tail(params) ? static_cast<float>(power(params.keep, age)) : 0.0f;
  }
  /// From this age on, keep^age is below exp(-24), so any probability contributes less than half a
  /// unit of 2^-32.
  static constexpr std::uint32_t tail(const Params& params) {
    const double forgets = 1 - params.keep;
    return forgets > 1e-8 ? static_cast<std::uint32_t>(24 / forgets) + 1 : kNoTail;
  }

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.mass = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step& step) {
    slot.mass = part_of(slot.mass, share32(power(params.keep, step.queries))) + seen.mass;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.mass;
  }
};

}  // namespace kvlab
