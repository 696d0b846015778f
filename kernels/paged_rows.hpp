// Keys and values in blocks of slots, as engines with paged caches keep them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvlab::kernels {

/// Where the key and the value of a slot lie, in a pool of blocks. What else is known of a slot is
/// indexed by slots as ever.
struct PagedRows {
  const std::int32_t* blocks = nullptr;  // [sequence, most_blocks], by_pair: [pair, most_blocks];
                                         // null: there are no blocks, rows lie slot by slot
  std::int64_t block_stride = 0, head_stride = 0;  ///< in elements of keys, and of values
  std::int32_t slot_stride = 0;                    ///< from a slot of a block to the next
  std::int32_t most_blocks = 0;
  std::int32_t shift = 0;  ///< log2 of a block's slots
  bool by_pair = false;    ///< KV heads have blocks of their own

  __host__ __device__ bool in_use() const { return blocks != nullptr; }
  /// The blocks of a pair, KV head `kv_head` of `sequence`.
  __host__ __device__ const std::int32_t* table(int pair, int sequence) const {
    return blocks + std::int64_t{by_pair ? pair : sequence} * most_blocks;
  }
  /// The element at which a slot begins, from the pool's first.
  __host__ __device__ std::int64_t begin(std::int32_t block, int kv_head, int slot) const {
    return block * block_stride + kv_head * head_stride +
           std::int64_t{slot & ((1 << shift) - 1)} * slot_stride;
  }
  /// By pair = sequence * kv_heads + kv_head.
  __host__ __device__ std::int64_t row(int pair, int kv_heads, int slot) const {
    return begin(table(pair, pair / kv_heads)[slot >> shift], pair % kv_heads, slot);
  }
};

inline constexpr int kFewestSlotsOfBlock = 16;

/// Whether blocks are ones that the kernels take; true where there are none. Rows begin at 16
/// bytes, of elements of `bytes`.
inline bool can_page(const PagedRows& rows, int head_size, std::int64_t most_slots,
                     std::size_t bytes) {
  constexpr int kMostShift = 20, kMostSlotStride = 1 << 24;
  if (!rows.in_use()) return true;
  const auto on16 = [bytes](std::int64_t elements) {
    return elements >= 0 && elements * static_cast<std::int64_t>(bytes) % 16 == 0;
  };
  return rows.shift >= 4 && rows.shift <= kMostShift && rows.most_blocks > 0 &&
         std::int64_t{rows.most_blocks} << rows.shift >= most_slots && on16(rows.block_stride) &&
         on16(rows.head_stride) && on16(rows.slot_stride) && rows.slot_stride >= head_size &&
         rows.slot_stride <= kMostSlotStride && rows.block_stride >= head_size &&
         (rows.by_pair || rows.head_stride >= head_size);
}

}  // namespace kvlab::kernels
