// Computes where keys and values are in paged memory (blocks of slots). It reads kvlab_pages on the
// device.
#pragma once

#include <cstdint>

#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// The element at which a slot begins, relative to the start of the pool. pair = sequence *
/// kv_heads + kv_head.
__device__ inline std::int64_t paged_row(const kvlab_pages& pages, int pair, int kv_heads,
                                         int slot) {
  const int shift = __ffs(pages.page) - 1;  // a power of two
  const int sequence =
      pair / kv_heads;  // computed here for all uses, so that loops divide only once
  const std::int64_t row = pages.by_pair != 0 ? pair : sequence;
  const std::int64_t block = pages.blocks[row * pages.max_blocks + (slot >> shift)];
  return block * pages.block_stride + pair % kv_heads * pages.head_stride +
         std::int64_t{slot & (pages.page - 1)} * static_cast<std::int32_t>(pages.slot_stride);
}

}  // namespace kvlab::kernels
