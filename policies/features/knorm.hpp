// knorm: evicts the token whose key has the largest norm, because keys of a small norm attract
// attention.
//
// Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
// section 3. Deliberate differences:
//   - the norm is taken before RoPE. RoPE rotates keys and keeps their norm, apart from rounding;
//   - the paper does not compress a prompt in its first two layers; here every layer has the same
//     budget;
//   - one token is evicted at each step; the paper compresses a prompt once.
#pragma once

#include "policies/features/by_feature.hpp"

namespace kvlab {

struct Knorm : HighestEvictedFirst {
  static constexpr PolicyInfo kInfo{
      .name = "knorm",
      .summary = "evicts the token whose key has the largest norm",
      .citation = "Devoto et al. 2024, L2 norm, section 3 (arXiv:2406.11430)",
      .order = Order::nested,
      .features = {"key_norm"}};
};

}  // namespace kvlab
