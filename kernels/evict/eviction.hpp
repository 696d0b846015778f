// Eviction on the device: one layer's cache as slots, and a policy's actions on it.
//
// A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head. Every pair has a
// separate budget, and so its number of slots, its live tokens and its victim. Data that changes
// from step to step is in device memory, so a captured graph stays valid.
#pragma once

#include "kernels/types.hpp"
#include "policies/policy.hpp"

namespace kvlab::kernels {

struct QuantizedCache;  // kernels/quantized/quantized_cache.hpp

/// Fills cache.ages from positions and lengths, for a cache that was not filled by decoding.
/// Compares every two tokens of a pair.
cudaError_t fill_ages(const kvlab_cache_view& cache, cudaStream_t stream);

inline constexpr std::uint32_t kUnlimited = 0xffff'ffffu;  ///< kvlab_rule::budget

/// At cache positions with rotated keys no key is rotated again. The run of newest tokens is as far
/// from the query by cache position as by original position. For the sinks, the query is rotated
/// back by as many positions as tokens were evicted.
struct EvictingAttentionArgs : kvlab_evicting_attention_args {
  const QuantizedCache* quantized_cache =
      nullptr;                   ///< host memory, if keys and values lie on tiers; or null
  const float* sinks = nullptr;  // [query_head]: see AttentionShape
};
inline constexpr std::uint32_t kIdle = 0xffff'ffffu;

/// Layers per launch that observes, at most.
inline constexpr int kMaxObservedLayers = 8;

}  // namespace kvlab::kernels
