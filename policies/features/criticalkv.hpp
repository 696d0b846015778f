// criticalkv: estimates how much the layer's output would change without a token. Evicts the token
// with the lowest accumulated attention times the magnitude of its value after the output
// projection.
//
// Feng et al. 2025, "Identify Critical KV Cache in LLM Inference from an Output Perturbation
// Perspective", algorithm 1, on H2O's score. Deliberate differences:
//   - the score is H2O's sum over all queries. The paper, and kvpress's CriticalKVPress in its
//     usual configuration, use SnapKV's score: the sum over the prompt's last 32 queries, pooled
//     over neighbours. H2O's sum keeps different tokens;
//   - the paper's first stage keeps half of the budget by attention alone, and its second stage
//     fills the rest by the product. rank() only has the data of one token, so it cannot determine
//     which tokens get the most attention. Therefore only the second stage is implemented (the
//     paper's alpha = 0);
//   - the paper adds 10^-4 to each mean attention, so that a large value counts even at zero
//     attention. Here `epsilon` is added for each query that the token has seen;
//   - the same differences as for h2o (policies/mass/h2o.hpp), such as exact sums and one set of
//     tokens for each KV head.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct CriticalKV {
  static constexpr PolicyInfo kInfo{
      .name = "criticalkv",
      .summary =
          "evicts the token with the lowest product of accumulated attention and the size of W_o v",
      .citation = "Feng et al. 2025, CriticalKV, algorithm 1 (arXiv:2502.03805)",
      .needs = Needs::mass,
      .recent = percent(50),
      .features = {"value_out_norm1"}};
  struct Params {
    double epsilon;
  };
  static constexpr Param<Params> kParams[]{
      {"epsilon", "attention that is added for each query", &Params::epsilon, 1e-4, 0, 1}};
  struct Slot {
    std::uint64_t mass;  // Q32.32
    std::uint32_t queries;
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot = {}; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.mass += seen.mass;
    slot.queries += seen.queries;
  }
  static constexpr double rank(const Slot& slot, Token token, const Params& params, const Step&) {
    const double added = params.epsilon * 4294967296.0 * static_cast<double>(slot.queries);
    return (static_cast<double>(slot.mass) + added) * static_cast<double>(token.feature[0]);
  }
};

}  // namespace kvlab
