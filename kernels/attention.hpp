// Attention over a cache of slots: one query a sequence (decode), or many (prefill).
//
// The cache of one layer is keys and values [sequence, kv_head, slot, dim] of `type`, keys rotated.
#pragma once

#include "kernels/paged_rows.hpp"
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
/// t % slots. Each KV head is split over the grid so that the card is full at any batch; the parts
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

/// One row of logits and their softmax, enough to have its probabilities again: the probability of
/// a key with product q · k is 2^(q · k * softmax_scale * log2 e - lse2).
struct alignas(8) RowSoftmax {
  float max_product;  ///< largest q · k, before the scale
  float lse2;         ///< log-sum-exp of the scaled logits, base 2
};

/// Queries of several sequences in one call, a sequence's behind another's, in q and in all that is
/// for each query. What else is [kv_head] then is [pair], pair = sequence * kv_heads + kv_head.
struct QueryBatch {
  const std::int32_t* first = nullptr;  // [sequences + 1], device: sequence s has queries first[s]
                                        // to first[s + 1] - 1 of all; null: there is one sequence
  int sequences = 1;
  int all = 0;  ///< queries of all: no less than first[sequences]
};

/// Queries of one sequence, causal: query i lies at slot first + older[kv_head] + i and sees that
/// slot and all before it, or `span` slots of them. (Nothing has been evicted: slot = position, and
/// older is null.)
struct PrefillAttentionArgs {
  AttentionShape shape;
  int first, queries;                   ///< queries: of a batch, the most of a sequence
  const void* q;                        // [query, query_head, dim] of type, rotated
  const void *keys, *values;            // one sequence of the layer's cache: [kv_head, slot, dim]
  void* out;                            // [query, query_head, dim] of type
  float* lse;                           // [query, query_head], natural logarithm, or null
  RowSoftmax* rows = nullptr;           ///< out, [query, query_head], or null
  const std::int32_t* older = nullptr;  ///< [kv_head], device; null: 0
  const std::int64_t* first_slot = nullptr;  ///< [kv_head], device: where a head's slots begin;
                                             ///< null: every shape.head_stride elements
  PagedRows paged{};                         ///< of keys and values; pairs are KV heads
  QueryBatch batch{};                        ///< first_slot is there
  int span = 0;                              ///< slots that a query sees at most; 0: all
  /// For few queries of many keys: keys are cut into parts of a CTA each, and what these come to is
  /// merged in their order. Without span and sinks. Null: a CTA takes all of a row's keys.
  void* workspace = nullptr;  // prefill_workspace() bytes, not shared by calls at one time
  int keys_end = 0;           ///< then: no query sees a slot from here on
};
std::size_t prefill_workspace(const PrefillAttentionArgs& args);
cudaError_t prefill_attention(const PrefillAttentionArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
