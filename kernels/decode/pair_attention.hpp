// Decode attention over pairs (a pair is one KV head of one sequence): the common part of
// decode_attention and the evicting attention. Internal to the library.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxGroup = 16;  ///< maximum number of query heads per KV head
/// The maximum for paged keys and values, and for the calls of kvlab.h on one layer. Larger groups
/// use other kernels.
inline constexpr int kMaxPagedGroup = 8;
inline constexpr int kSlotsPerTile = 64;  ///< slots that a CTA handles at a time
inline constexpr int kMaxCtas = 288;      ///< maximum number of CTAs in a grid
inline constexpr int kMaxPairs = 1 << 15;

/// Where each pair's slots are, and how many of them hold live tokens.
struct PairTable {
  int pairs, kv_heads;
  int max_slots;                ///< capacity of the largest pair
  const std::int32_t* lengths;  // [sequence]; if there are next_slots, [pair]
  const std::int32_t*
      next_slots;  // [pair]: slot of the newest token; null: the newest token is in the last slot
  const std::uint32_t* now;  // [sequence]: kIdle if the sequence is idle; null: no sequence is idle
  const std::int64_t* first_slot;             // [pair]; null: the strides define where slots begin
  std::int64_t sequence_stride, head_stride;  ///< in elements
};

/// The arrays in which the attention stores its results for the launch that observes. If all are
/// null, it stores nothing.
struct PairRows {
  float* logits;    // [pair, row_slots(), logits_stride()], base 2, scaled
  float2* softmax;  // [pair, kMaxGroup]: largest logit of a token, and its probability
  // [pair]: age of the token whose slot the newest token took; kNone: the slot was free
  std::uint32_t* gone;
  static constexpr std::uint32_t kNone = 0xffff'ffffu;
};
/// Slots of a pair in PairRows::logits.
constexpr std::int64_t row_slots(int max_slots) {
  return std::int64_t{max_slots + kSlotsPerTile - 1} / kSlotsPerTile * kSlotsPerTile;
}

/// Number of floats per slot in PairRows::logits: the number of heads of the group, rounded up to
/// an even number if it is above 1.
constexpr int logits_stride(int group) { return group == 1 ? 1 : (group + 1) / 2 * 2; }

/// The first bytes of a workspace. Their layout does not depend on sizes, so launches with
/// different sizes can use the same workspace one after another.
struct Signals {
  /// [cta]: number of parts that have arrived, for the cut pair that begins in this CTA
  std::int32_t arrived[kMaxCtas];
  std::int32_t
      observed[kMaxPairs];  ///< [pair]: number of thread blocks that have observed their slots
};

static_assert(sizeof(Signals) == kSignalBytes);

struct PairAttention {
  Type type;
  int group, head_size;
  float softmax_scale;
  PairTable table;
  const void* q;              // [pair, head of the group, dim]
  const void *keys, *values;  // [slot, dim], contiguous or in pages
  // [slot]: keys are rotated when they are read, by these ages; null: keys are already rotated
  const std::uint32_t* ages;
  const kvlab_rule* rules;  // [pair]: if not null, keys are already rotated, and the query is
                            // rotated for each pair's sinks
  const float* inv_freq;    // [head_size / 2], needed with ages or rules
  void* out;                // [pair, head of the group, dim]
  float* lse;               // [pair, head of the group], or null
  bool settled;             ///< see DecodeAttentionArgs
  PairRows rows;
  void* workspace;     // pair_attention_workspace() bytes
  const float* sinks;  // [kv_head, head of the group]: logits that belong to no token; or null
};

/// Whether there are kernels for the shape on any device.
bool is_pair_attention(const PairAttention& args, const kvlab_pages& paged = {});
/// Bytes of workspace for the current device. 0 if the shape is not supported or needs more shared
/// memory than the device has; kNoDevice if there is no device.
inline constexpr std::size_t kNoDevice = ~std::size_t{0};
std::size_t pair_attention_workspace(const PairAttention& args, const kvlab_pages& paged = {});
/// `paged`: the pages that hold keys and values; requires table.next_slots. Without pages, keys and
/// values are contiguous.
cudaError_t pair_attention(const PairAttention& args, const kvlab_pages& paged,
                           cudaStream_t stream);

/// pair_attention() for groups of more than kMaxPagedGroup heads.
cudaError_t wide_pair_attention(const PairAttention& args, cudaStream_t stream);
/// pair_attention() for pages.
cudaError_t paged_pair_attention(const PairAttention& args, const kvlab_pages& paged,
                                 cudaStream_t stream);

}  // namespace kvlab::kernels
