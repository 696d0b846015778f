// Eviction on the device: the slots of one layer's cache, and attention that evicts under a policy.
//
// A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head. Every pair has a
// separate budget, and therefore separate slots, live tokens and victims. Data that changes from
// step to step is in device memory, so a captured graph stays valid.
#pragma once

#include "kernels/types.hpp"
#include "policies/policy.hpp"

namespace kvlab::kernels {

struct QuantizedCache;  // kernels/quantized/quantized_cache.hpp

/// Computes cache.ages from positions and lengths, for a cache that was not filled by decoding.
/// Compares each token with every other token of its pair.
cudaError_t fill_ages(const kvlab_cache_view& cache, cudaStream_t stream);

inline constexpr std::uint32_t kUnlimited = 0xffff'ffffu;  ///< as a budget: nothing is evicted

/// At cache positions with rotated keys, no key is rotated again. The newest tokens follow each
/// other without a gap, so their distances to the query are the same in cache positions as in
/// original positions. For the sinks, the query is rotated back by the number of evicted tokens.
struct EvictingAttentionArgs : kvlab_evicting_attention_args {
  const QuantizedCache* quantized_cache =
      nullptr;                   ///< in host memory; null if no keys and values are on tiers
  const float* sinks = nullptr;  // [query_head]: see AttentionShape
};
inline constexpr std::uint32_t kIdle = 0xffff'ffffu;

/// Maximum number of layers in one observing launch.
inline constexpr int kMaxObservedLayers = 8;

}  // namespace kvlab::kernels
