// Eviction on the device: one layer's cache as slots, and what a policy does to it.
//
// A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head. Every pair has its
// own budget, hence its own number of slots, its own live tokens and its own victim. What changes
// from step to step is in device memory, so that a captured graph goes on serving.
#pragma once

#include "kernels/types.hpp"
#include "policies/policy.hpp"

namespace kvlab::kernels {

struct QuantizedCache;  // kernels/quantized/quantized_cache.hpp

/// Fills cache.ages from positions and lengths: where the cache was filled by other means than
/// decoding. Compares every two tokens of a pair.
cudaError_t fill_ages(const kvlab_cache& cache, cudaStream_t stream);

inline constexpr std::uint32_t kUnlimited = 0xffff'ffffu;  ///< kvlab_rule::budget

/// At cache positions with rotated keys no key is rotated: the run of the newest is as far from the
/// query by number as by position; for the sinks the query is rotated back by as many positions as
/// tokens have left.
struct EvictingAttentionArgs : kvlab_evicting_attention_args {
  const QuantizedCache* quantized_cache =
      nullptr;                   ///< host memory: keys and values lie on tiers; or null
  const float* sinks = nullptr;  // [query_head]: as AttentionShape has them
};
inline constexpr std::uint32_t kIdle = 0xffff'ffffu;

/// Of one launch that observes.
inline constexpr int kMaxObservedLayers = 8;

}  // namespace kvlab::kernels
