// lagkv: a token is told by how its key and value lie in the range of those that come after it. The
// token that does so least is evicted first.
//
// Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are
// Important", equations 1 to 6. The feature `lagkv` is the paper's score (scored.hpp). Deliberate
// differences:
//   - the paper keeps as many tokens of each partition, so its score is compared within a partition
//     only; here the tokens' places within their partitions are compared over all of them;
//   - a score looks ahead to the end of the next partition, up to 2 L - 1 tokens, and a token whose
//     append ends before it is not scored: it stays longest. Where `kvlab.hf features` has made
//     the feature, a decoded token's looks ahead: with `recent` of 2 L - 1 no rank is asked early;
//   - the paper holds 16 first tokens, the protection here 4.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct LagKV : LowestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "lagkv",
      .summary = "the token least told by the range of those after it is evicted first",
      .citation = "Liang et al. 2025, LagKV, equations 1 to 6 (arXiv:2504.04704)",
      .order = Order::nested,
      .sinks = tokens(4),
      .recent = percent(50),
      .features = {"lagkv"}};
};

}  // namespace kvlab
