// lagkv: scores a token by its key and value relative to the range of the tokens that follow it.
// Evicts the token with the lowest score.
//
// Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are
// Important", equations 1 to 6. The feature `lagkv` is the paper's score (scored.hpp). Deliberate
// differences:
//   - the paper keeps the same number of tokens in each partition, so it compares scores only
//     within a partition. Here a token's position in the order of its partition is compared over
//     all partitions;
//   - a score looks ahead to the end of the next partition, up to 2 L - 1 tokens. A token whose
//     append ends before that is not scored and is evicted last. If `kvlab.hf features` made the
//     feature, the score of a decoded token looks ahead too: with `recent` of 2 L - 1 tokens, no
//     rank is used before its look-ahead has been appended;
//   - the paper keeps the first 16 tokens; here 4 are protected.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct LagKV : LowestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "lagkv",
      .summary =
          "evicts the token with the lowest lag-relative score, from the key and value range of "
          "the tokens after it",
      .citation = "Liang et al. 2025, LagKV, equations 1 to 6 (arXiv:2504.04704)",
      .order = Order::nested,
      .sinks = tokens(4),
      .recent = percent(50),
      .features = {"lagkv"}};
};

}  // namespace kvlab
