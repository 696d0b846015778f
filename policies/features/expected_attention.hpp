// expected_attention: what queries to come will give a token, were they drawn as those before. The
// token that can expect least, times the length of its value, is evicted first.
//
// Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future
// Queries Distribution", section 3. The feature `expected_attention` is the paper's score
// (scored.hpp). Deliberate differences:
//   - a decoded token's score takes the queries' mean and covariance as they were at the end of the
//     prompt before it, or of its last chunk of several; the paper compresses a prompt once;
//   - soft caps and sink logits are not looked at;
//   - heads of a group are averaged, as the authors' code does.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct ExpectedAttention : LowestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "expected_attention",
      .summary = "the least attention to be expected from queries to come is evicted first",
      .citation = "Devoto et al. 2025, Expected Attention, section 3 (arXiv:2510.00636)",
      .order = Order::nested,
      .sinks = tokens(4),
      .features = {"expected_attention"}};
};

}  // namespace kvlab
