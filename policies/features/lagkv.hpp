// lagkv: scores a token by its key and value relative to the range of the tokens that follow it.
// Evicts the token with the lowest score.
//
// Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are
// Important", equations 1 to 6. The feature `lagkv` is the paper's score (scored.hpp). Deliberate
// differences:
//   - the paper keeps the same number of tokens in each partition, so it compares scores only
//     within a partition. Here a token's score is its position in its partition when the partition
//     is ordered by the paper's score. So tokens of different partitions can be compared;
//   - a score depends on all tokens up to the end of the next partition, which are up to 2 L - 1
//     later tokens (L: tokens per partition, 128). A token whose append ends before that is not
//     scored and is evicted last. If `kvlab.hf features` computed the feature, the score of a
//     decoded token also depends on later tokens. With `recent` of 2 L - 1 tokens, these have been
//     appended before its rank is used;
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
