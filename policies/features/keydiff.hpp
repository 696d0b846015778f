// keydiff: keys that point where most keys point tell the least. The token whose key is most like
// the mean of the unit keys is evicted first.
//
// Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction", algorithm 1. Deliberate
// differences:
//   - the mean is over every key up to the end of the token's own append, evicted ones too, and
//     stays what it was then; the paper takes it anew over the keys that are live;
//   - keys are compared before RoPE. The paper, and kvpress's KeyDiffPress, compare them as attention
//     uses them, which ranks other tokens first: `keydiff:name=key_cosine_rope`, a feature that
//     `kvlab.hf features` adds to a trace and no decoder computes.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct KeyDiff : HighestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "keydiff",
      .summary =
          "the key most like the mean of the keys is evicted first: `name=` says of which keys",
      .citation = "Park et al. 2025, KeyDiff, algorithm 1 (arXiv:2504.15364)",
      .order = Order::nested,
      .features = {"name=key_cosine"}};
};

}  // namespace kvlab
