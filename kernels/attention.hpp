// Attention over a cache of slots: one query per sequence (decode), or many queries (prefill).
//
// The cache of one layer is keys and values [sequence, kv_head, slot, dim] of `type`. Keys are
// rotated (RoPE).
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Head sizes 64, 96, 128, 256; groups (query heads per KV head) 1 to 16.
struct AttentionShape {
  Type type;
  int query_heads, kv_heads, head_size;
  float softmax_scale;
  std::int64_t sequence_stride,
      head_stride;  ///< strides of the cache, in elements; a slot has head_size elements
  /// [query_head], device: an extra logit per head, which counts in the softmax but belongs to no
  /// token. Null: none.
  const float* sinks = nullptr;
};

/// Each sequence s has one query, which attends to the sequence's first lengths[s] slots. The last
/// of these slots holds the query's own token. If a length exceeds `slots`, the slots are a ring
/// with the newest tokens, where token t is at t % slots.
///
/// The slots of each KV head are split into parts among thread blocks, so that the GPU is busy at
/// any batch size. The parts are merged in a fixed order, so equal inputs give equal bits. (The
/// boundaries of the parts depend on the lengths of all sequences and on the device, so a
/// sequence's bits may differ in another batch.) All pointers except lengths and lse, and all
/// strides, must be 16-byte aligned. At most 32,768 sequences x KV heads.
struct DecodeAttentionArgs {
  AttentionShape shape;
  int sequences, slots;         ///< slots: capacity of each sequence
  const void* q;                // [sequence, query_head, dim] of type, rotated
  const void *keys, *values;    // the layer's cache
  const std::int32_t* lengths;  // [sequence], device; 0: nothing is written
  void* out;                    // [sequence, query_head, dim] of type
  float* lse;                   // [sequence, query_head], natural logarithm, or null
  void* workspace;  // decode_attention_workspace() bytes. The first kSignalBytes must be zero
                    // before the first use. Calls that run at the same time must not share it.
  /// Set it only if kernels that may run at the same time write neither lengths nor keys and
  /// values, except the key and value of each sequence's last token. This holds in a graph whose
  /// step appends one token. The kernel then loads keys and values while the preceding kernels
  /// still run.
  bool settled = false;
};
/// Bytes of workspace for the current device; 0 if the shape is not supported.
std::size_t decode_attention_workspace(const AttentionShape& shape, int sequences, int slots);
cudaError_t decode_attention(const DecodeAttentionArgs& args, cudaStream_t stream);

/// The probability of a key with product q · k is 2^(q · k * softmax_scale * log2 e - lse2).
using RowSoftmax = kvlab_row_softmax;

/// Properties of a layer that kvlab_prefill_args does not contain.
struct PrefillLayer {
  std::int64_t head_stride =
      0;  ///< without first_slot: elements from a KV head's slots to those of the next
  const float* sinks = nullptr;  ///< see AttentionShape
  int window = 0;  ///< sliding window: maximum number of slots that a query sees; 0: no limit
};
std::size_t prefill_workspace(const kvlab_prefill_args& args);
/// `args` may split keys into parts only if the layer has neither a sliding window nor sinks.
cudaError_t prefill_attention(const kvlab_prefill_args& args, const PrefillLayer& layer,
                              cudaStream_t stream);
/// Like the overload above, for slots with the layout of `shape`. All other arguments are in
/// `args`.
cudaError_t prefill_attention(const AttentionShape& shape, kvlab_prefill_args args, int window,
                              cudaStream_t stream);

}  // namespace kvlab::kernels
