// Cache positions in an append: rotated copies of queries and keys are written to separate memory.
// The cache itself keeps keys as they were before RoPE, or rotated to their original positions.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// The tokens of an append of one sequence, in one layer. `older` tokens were live before the
/// append, and the new tokens follow them. A token's cache position is the number of live tokens
/// that are older than it. For a new token this is older[kv_head] plus its index.
struct CachePositionArgs {
  Type type;
  int query_heads, kv_heads, head_size;
  int rotated;
  const float* inv_freq;      // [rotated / 2], device; angles are computed in float64
  float rope_factor;          ///< factor on cos and sin
  const std::int32_t* older;  // [kv_head], device
  int first, tokens;          ///< the new tokens to handle: `first` to first + tokens - 1
};
/// to[token, query_head] = q, rotated to the token's cache position. May run in place.
cudaError_t rotate_queries_to_cache_positions(const CachePositionArgs& args, const void* q,
                                              void* to, cudaStream_t stream);

/// Keys [kv_head, slot, dim], with `slots` slots for each head.
///
/// If keys are already rotated and queries stay at their original positions, new keys are only
/// copied, and each older key is rotated forward by the number of evicted tokens that came after
/// it. As a result, differences between rotated positions equal differences between cache
/// positions.
struct CachePositionKeysArgs {
  CachePositionArgs shape;
  int slots;
  const std::uint32_t* positions;  // [kv_head, slot]: positions of the older tokens
  /// Whether keys are already rotated to their original positions. They then include rope_factor,
  /// and shape.rope_factor must be 1.
  bool rotated;
  std::uint32_t now;  ///< if rotated: position of the first new token
  const void* keys;
  void* to;
};
/// Rotates the new tokens' keys from `first` on or, with `rotates_older`, the older tokens' keys
/// (then first and tokens are ignored).
cudaError_t rotate_keys_to_cache_positions(const CachePositionKeysArgs& args, bool rotates_older,
                                           cudaStream_t stream);

}  // namespace kvlab::kernels
