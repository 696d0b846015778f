// lagkv: a token is told by how its key and value lie in the range of those that come after it. The
// token that does so least leaves first.
//
// Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are
// Important", equations 1 to 6. The column `lagkv` is the paper's score, by `kvlab.hf columns`; the
// engine cannot compute it yet, so this policy is replayed and not deployed. Deliberate
// differences:
//   - the paper keeps as many tokens of each partition, so its score is compared within a partition
//     only; here the tokens' places within their partitions are compared over all of them;
//   - a score looks ahead to the end of the next partition, up to 2 L - 1 tokens: with `recent` of
//     that many no rank is asked before it could be known, with fewer the replay peeks;
//   - the paper holds 16 first tokens, the guard here 4.
#pragma once

#include "policies/columns/by_column.hpp"

namespace kvlab {

struct LagKV : LowestLeaves {
  static constexpr PolicyInfo kInfo{
      .name = "lagkv",
      .summary = "the token least told by the range of those after it leaves first",
      .citation = "Liang et al. 2025, LagKV, equations 1 to 6 (arXiv:2504.04704)",
      .order = Order::nested,
      .sinks = tokens(4),
      .recent = percent(50),
      .columns = {"lagkv"}};
};

}  // namespace kvlab
