// expected_attention: estimates the attention that future queries will give a token, on the
// assumption that they are distributed like past queries. Evicts the token with the lowest expected
// attention times the norm of its value.
//
// Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future
// Queries Distribution", section 3. The feature `expected_attention` is the paper's score
// (scored.hpp). Deliberate differences:
//   - a token's score uses the mean and covariance of the queries up to the end of the last append
//     that had several tokens. For a decoded token this is usually the end of the preceding prompt.
//     The paper compresses a prompt once;
//   - soft caps and sink logits are ignored;
//   - the heads of a group are averaged, as in the authors' code.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct ExpectedAttention : LowestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "expected_attention",
      .summary = "evicts the token with the lowest expected attention from future queries",
      .citation = "Devoto et al. 2025, Expected Attention, section 3 (arXiv:2510.00636)",
      .order = Order::nested,
      .sinks = tokens(4),
      .features = {"expected_attention"}};
};

}  // namespace kvlab
