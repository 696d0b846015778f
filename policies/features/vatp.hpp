// vatp: evicts the token with the lowest accumulated attention times the magnitude of its value.
// Attention measures how much a value is used, and its magnitude measures how much that changes the
// output.
//
// Guo et al. 2024, "Attention Score is not All You Need for Token Importance Indicator in KV Cache
// Reduction: Value Also Matters", equation 3, on H2O's score. Deliberate differences:
//   - the first tokens have small values, so the paper keeps its first 20 tokens. Here `sinks`
//     protects them (`vatp:sinks=20`);
//   - the same differences as for h2o (policies/mass/h2o.hpp), such as exact sums and one set of
//     tokens for each KV head.
#pragma once

#include "policies/mass/h2o.hpp"

namespace kvlab {

struct Vatp : AccumulatedMass {
  static constexpr PolicyInfo kInfo{
      .name = "vatp",
      .summary =
          "evicts the token with the lowest product of accumulated attention and the value's norm",
      .citation = "Guo et al. 2024, VATP, equation 3 (arXiv:2406.12335)",
      .needs = Needs::mass,
      .recent = percent(50),
      .features = {"value_norm1"}};

  static constexpr double rank(const Slot& slot, Token token, const Params&, const Step&) {
    return static_cast<double>(slot.mass) * static_cast<double>(token.feature[0]);
  }
};

}  // namespace kvlab
