// The columns that are computed from keys and values (docs/configurations.md), on the device, in
// the bits of the host's ColumnMaker.
#pragma once

#include "kernels/evict/eviction.hpp"
#include "kernels/types.hpp"
#include "policies/columns/built_in.hpp"

namespace kvlab::kernels {

/// The columns of a policy, in its order.
struct ColumnList {
  int count = 0;
  BuiltInColumn of[kMaxColumns]{};

  constexpr bool has(BuiltInColumn column) const {
    for (int c = 0; c < count; ++c)
      if (of[c] == column) return true;
    return false;
  }
};

/// New tokens of each sequence, of which the values are in the cache.
struct ColumnArgs {
  SlotCache cache;
  ColumnList columns;
  const std::int32_t* slots;  // [pair], from first_slot: of the first new token; the others follow
  int tokens;                 ///< of each sequence
  const std::uint32_t* now;   // [sequence]: kIdle: sits out; or null
  const void* keys;           // [sequence, token] rows of [kv_head, dim], before RoPE, of type
  std::int64_t key_row;       ///< elements from one token to the next
  float* unit_keys;           // [pair, dim]: the sum of all tokens' unit keys so far, to which the
                              // new ones are added; null without key_cosine
  float* to;                  // [slot, column]
  const void* output = nullptr;  // W_o [hidden, query_head, dim], of type; for value_out_norm1
  int hidden = 0;
  const void* values = nullptr;  // [pair, dim]: those of one new token each; null: in the cache
  const std::uint32_t* admitted = nullptr;  // [sequence]: only so many of its tokens; null: all
};
/// A block for each pair, which reads a key and a value once for each column. The norms of one
/// token take a thread's sum over its elements, in order; key_cosine adds up the tokens one after
/// another. value_out_norm1 takes a launch of its own, a block for up to eight tokens of a pair,
/// which reads the group's rows of W_o, and at most 16 query heads for a KV head.
cudaError_t make_columns(const ColumnArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
