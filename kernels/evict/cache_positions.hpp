// Cache positions of an append: queries and keys rotated to cache positions, into memory of their
// own. The cache keeps its keys as they were before RoPE, or rotated at their positions.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// One sequence's tokens of an append in one layer: `older` ones are live already, the new ones
/// lie behind them. A token's cache position is the number of live tokens older than it, that is,
/// for a new one, older[kv_head] + its index.
struct CachePositionArgs {
  Type type;
  int query_heads, kv_heads, head_size;
  int rotated;
  const float* inv_freq;      // [rotated / 2], device; angles are float64
  float rope_factor;          ///< on cos and sin
  const std::int32_t* older;  // [kv_head], device
  int first, tokens;          ///< new tokens first … first + tokens - 1
};
/// to[token, query_head] = q rotated to the token's cache position. In place is allowed.
cudaError_t rotate_queries_to_cache_positions(const CachePositionArgs& args, const void* q,
                                              void* to, cudaStream_t stream);

/// Keys [kv_head, slot, dim], `slots` for each head.
///
/// Where they are rotated already, and the queries stay at their positions, the new keys are copied
/// and each older one is rotated on by as many positions as younger tokens than it have left: so
/// only differences of positions are those of ages.
struct CachePositionKeysArgs {
  CachePositionArgs shape;
  int slots;
  const std::uint32_t* positions;  // [kv_head, slot], of the older ones
  bool rotated;       ///< keys, at their positions; rope_factor is in them, and to be 1 here
  std::uint32_t now;  ///< where rotated: position of the first new token
  const void* keys;
  void* to;
};
/// The new tokens `first …`, or with `of_older` the older ones (first and tokens are not looked
/// at).
cudaError_t rotate_keys_to_cache_positions(const CachePositionKeysArgs& args, bool of_older,
                                           cudaStream_t stream);

}  // namespace kvlab::kernels
