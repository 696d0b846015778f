// keydiff: evicts the token whose key is most similar to the mean of the unit keys, because keys
// that point in the common direction carry the least information.
//
// Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction", algorithm 1. Deliberate
// differences:
//   - the mean is over all keys up to the end of the token's append, including those of evicted
//     tokens, and is not updated later; the paper recomputes it over the live keys;
//   - keys are compared before RoPE. The paper, and kvpress's KeyDiffPress, compare them after
//     RoPE, which gives another order. `keydiff:name=key_cosine_rope` compares them after RoPE,
//     too. `kvlab.hf features` adds this feature to a trace; no decoder computes it.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct KeyDiff : HighestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "keydiff",
      .summary =
          "evicts the token whose key is most similar to the mean key; `name=` selects the keys",
      .citation = "Park et al. 2025, KeyDiff, algorithm 1 (arXiv:2504.15364)",
      .order = Order::nested,
      .features = {"name=key_cosine"}};
};

}  // namespace kvlab
