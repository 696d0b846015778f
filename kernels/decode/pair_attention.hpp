// Decode attention over pairs, one KV head of one sequence each: what decode_attention and the
// evicting attention share. Not for callers of the library.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxGroup = 16;  ///< query heads that share a KV head
/// Likewise where keys and values lie in blocks, and of the library. More heads take other kernels.
inline constexpr int kMaxPagedGroup = 8;
inline constexpr int kSlotsPerTile = 64;  ///< that a CTA takes at a time
inline constexpr int kMaxCtas = 288;      ///< of a grid
inline constexpr int kMaxPairs = 1 << 15;

/// Where each pair's slots are, and how many hold live tokens.
struct PairTable {
  int pairs, kv_heads;
  int max_slots;                   ///< capacity of the largest pair
  const std::int32_t* lengths;     // [sequence]; [pair] where there are next_slots
  const std::int32_t* next_slots;  // [pair]: slot of the newest token; null: the last one
  const std::uint32_t* now;        // [sequence]: kIdle sits out; null: all take part
  const std::int64_t* first_slot;  // [pair]; null: strides
  std::int64_t sequence_stride, head_stride;  ///< in elements
};

/// What is left of each pair for the launch that observes; all null: nothing.
struct PairRows {
  float* logits;        // [pair, row_slots(), logits_stride()], base 2, scaled
  float2* softmax;      // [pair, kMaxGroup]: largest logit of a token, and its probability
  std::uint32_t* gone;  // [pair]: age of the token whose slot the newest took; kNone: of none
  static constexpr std::uint32_t kNone = 0xffff'ffffu;
};
/// Slots of a pair in PairRows::logits.
constexpr std::int64_t row_slots(int max_slots) {
  return std::int64_t{max_slots + kSlotsPerTile - 1} / kSlotsPerTile * kSlotsPerTile;
}

/// Floats of a slot in PairRows::logits: one for each head of the group, in pairs if there are two.
constexpr int logits_stride(int group) { return group == 1 ? 1 : (group + 1) / 2 * 2; }

/// The first bytes of a workspace. Their places depend on nothing, so that launches of different
/// sizes may follow each other.
struct Signals {
  std::int32_t arrived[kMaxCtas];    ///< parts of the pair that begins in this CTA and is cut
  std::int32_t observed[kMaxPairs];  ///< blocks that have observed their slots of a pair
};

static_assert(sizeof(Signals) == kSignalBytes);

struct PairAttention {
  Type type;
  int group, head_size;
  float softmax_scale;
  PairTable table;
  const void* q;              // [pair, head of the group, dim]
  const void *keys, *values;  // [slot, dim]; or blocks of slots
  const std::uint32_t* ages;  // [slot]: keys are rotated here, by age; null: they are rotated
  const kvlab_rule*
      rules;              // [pair]: the query is rotated for its sinks, with rotated keys; or null
  const float* inv_freq;  // [head_size / 2], where there are ages or rules
  void* out;              // [pair, head of the group, dim]
  float* lse;             // [pair, head of the group], or null
  bool settled;           ///< see DecodeAttentionArgs
  PairRows rows;
  void* workspace;     // pair_attention_workspace() bytes
  const float* sinks;  // [kv_head, head of the group]: logits that no token has; or null
};

/// Whether there are kernels for the shape, on some device.
bool is_pair_attention(const PairAttention& args, const kvlab_pages& paged = {});
/// For the current device; 0 for what is not supported or does not fit, else kNoDevice where there
/// is none.
inline constexpr std::size_t kNoDevice = ~std::size_t{0};
std::size_t pair_attention_workspace(const PairAttention& args, const kvlab_pages& paged = {});
/// `paged`, where there are next_slots: where keys and values lie in blocks.
cudaError_t pair_attention(const PairAttention& args, const kvlab_pages& paged,
                           cudaStream_t stream);

/// What pair_attention does where groups are of more than kMaxPagedGroup.
cudaError_t wide_pair_attention(const PairAttention& args, cudaStream_t stream);
/// What pair_attention does where blocks are in use.
cudaError_t paged_pair_attention(const PairAttention& args, const kvlab_pages& paged,
                                 cudaStream_t stream);

}  // namespace kvlab::kernels
