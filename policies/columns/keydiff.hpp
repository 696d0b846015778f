// keydiff: keys that point where most keys point tell the least. The token whose key is most like
// the mean of the unit keys leaves first.
//
// Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction", algorithm 1. Deliberate
// differences:
//   - the mean is over every key up to the end of the token's own admission, evicted ones too, and
//     stays what it was then; the paper takes it anew over the keys that are live;
//   - keys are compared before RoPE, as they are stored; the paper compares them as attention uses
//     them.
#pragma once

#include "policies/columns/by_column.hpp"

namespace kvlab {

struct KeyDiff : HighestLeaves {
  static constexpr PolicyInfo kInfo{
      .name = "keydiff",
      .summary = "the key most like the mean of the keys leaves first",
      .citation = "Park et al. 2025, KeyDiff, algorithm 1 (arXiv:2504.15364)",
      .order = Order::nested,
      .columns = {"key_cosine"}};
};

}  // namespace kvlab
