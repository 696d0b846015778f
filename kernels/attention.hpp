// Attention over a cache of slots: one query a sequence (decode), or many (prefill).
//
// The cache of one layer is keys and values [sequence, kv_head, slot, dim] of `type`, keys rotated.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Head sizes 64, 96, 128, 256; groups (query heads per KV head) 1 to 16.
struct AttentionShape {
  Type type;
  int query_heads, kv_heads, head_size;
  float softmax_scale;
  std::int64_t sequence_stride,
      head_stride;  ///< of the cache, in elements; a slot is head_size long
  /// [query_head], device: a logit that no token has, beside those of the tokens; null: none.
  const float* sinks = nullptr;
};

/// One query for each sequence, over its first lengths[s] slots (the query's own is the last of
/// them). Where a length exceeds `slots`, these are a ring that holds the newest tokens, token t at
/// t % slots. Each KV head is split over the grid so that the GPU is full at any batch; the parts
/// are merged in a fixed order: equal inputs give equal bits. (Where it is split depends on all
/// lengths and on the device, so a sequence's bits may differ in another batch.) Pointers but
/// lengths and lse, and strides: at 16-byte boundaries. At most 32768 sequences x KV heads.
struct DecodeAttentionArgs {
  AttentionShape shape;
  int sequences, slots;         ///< slots: capacity
  const void* q;                // [sequence, query_head, dim] of type, rotated
  const void *keys, *values;    // the layer's cache
  const std::int32_t* lengths;  // [sequence], device; 0: nothing is written
  void* out;                    // [sequence, query_head, dim] of type
  float* lse;                   // [sequence, query_head], natural logarithm, or null
  void* workspace;  // decode_attention_workspace() bytes, the first kSignalBytes zero before the
                    // first use; not shared by calls at one time
  /// No kernel that this one may overlap writes lengths, or any key and value but each sequence's
  /// last one: so in a graph whose step appends one token. Then it fetches keys and values while
  /// the kernels before it still run.
  bool settled = false;
};
/// For the current device; 0 for what is not supported.
std::size_t decode_attention_workspace(const AttentionShape& shape, int sequences, int slots);
cudaError_t decode_attention(const DecodeAttentionArgs& args, cudaStream_t stream);

/// The probability of a key with product q · k is 2^(q · k * softmax_scale * log2 e - lse2).
using RowSoftmax = kvlab_row_softmax;

/// What kvlab_prefill_args does not say of a layer.
struct PrefillLayer {
  std::int64_t head_stride =
      0;  ///< without first_slot: elements from a KV head's slots to the next
  const float* sinks = nullptr;  ///< as AttentionShape has them
  int window = 0;                ///< slots that a query sees at most; 0: all
};
std::size_t prefill_workspace(const kvlab_prefill_args& args);
/// Parts of keys want a layer without a window and sinks.
cudaError_t prefill_attention(const kvlab_prefill_args& args, const PrefillLayer& layer,
                              cudaStream_t stream);
/// Of slots that lie as `shape` says: the rest of `args`.
cudaError_t prefill_attention(const AttentionShape& shape, kvlab_prefill_args args, int window,
                              cudaStream_t stream);

}  // namespace kvlab::kernels
