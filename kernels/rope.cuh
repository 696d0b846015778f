// Code shared by `rope_write` and by the matrix product that includes the work of `rope_write`.
#pragma once

#include "kernels/evict/eviction.hpp"
#include "kernels/paged_row.cuh"
#include "kernels/pointwise.hpp"

namespace kvlab::kernels {

/// Rotates a point by the angle with this cosine and sine. The result must equal that of
/// RopeTable::rotate() bit for bit, because it is quantized later.
__device__ inline float2 rotate(float2 point, float2 cos_sin) {
  return {point.x * cos_sin.x - point.y * cos_sin.y, point.y * cos_sin.x + point.x * cos_sin.y};
}

/// Cosines and sines of a token's position, [rotated / 2]; null if nothing is rotated. For an idle
/// sequence the row index may be KVLAB_IDLE, which is -1 here. The function then returns any row,
/// because no result computed from it is written.
__device__ inline const float2* rope_row(const RopeWriteArgs& args, int token) {
  if (args.rotated == 0) return nullptr;
  return reinterpret_cast<const float2*>(args.rope) +
         static_cast<std::int64_t>(max(args.rope_rows[token], 0)) * (args.rotated / 2);
}

/// The place where a token's keys and values are written. The constructor reads all data of the
/// token that it needs.
class TokenSlot {
 public:
  TokenSlot() = default;
  __device__ TokenSlot(const RopeWriteArgs& args, int token)
      : sequence_(args.sequences[token]),
        slot_(args.slots ? args.slots[token] : 0),
        is_idle_(args.now && args.now[sequence_] == kIdle) {
    if (args.ring > 0) slot_ %= args.ring;
  }
  /// Whether the sequence is idle. All slots of an idle sequence stay unchanged, including the slot
  /// of its next token.
  __device__ bool is_idle() const { return is_idle_; }
  /// The slot of a KV head, in elements from the start of the cache.
  __device__ std::int64_t head_offset(const RopeWriteArgs& args, int kv_head) const {
    const kvlab_cache_view& cache = args.cache;
    if (!cache.first_slot)
      return sequence_ * args.sequence_stride + kv_head * args.head_stride +
             static_cast<std::int64_t>(slot_) * cache.head_size;
    const int pair = sequence_ * cache.kv_heads + kv_head;
    return (cache.first_slot[pair] + cache.next_slots[pair] + slot_) * cache.head_size;
  }
  /// Like head_offset(), for keys and values in pages. head_offset() ignores the table of pages.
  __device__ std::int64_t paged_offset(const RopeWriteArgs& args, int kv_head) const {
    const kvlab_cache_view& cache = args.cache;
    const int pair = sequence_ * cache.kv_heads + kv_head;
    return paged_row(cache.pages, pair, cache.kv_heads, cache.next_slots[pair] + slot_);
  }
  /// Stores the token's position at the slot of its key, in a cache with slots by pair.
  __device__ void note_position(const RopeWriteArgs& args, std::int64_t place) const {
    if (args.cache.first_slot && args.cache.positions && args.now)
      args.cache.positions[place / args.cache.head_size] = args.now[sequence_];
  }

 private:
  int sequence_ = 0, slot_ = 0;
  bool is_idle_ = false;
};

}  // namespace kvlab::kernels
