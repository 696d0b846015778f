// Arranges the tiles of all pairs in one row, so that any number of CTAs can share them evenly.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Number of slots of a pair with live tokens, including the newest; 0 if the sequence is idle.
__device__ inline int live_slots(const PairTable& table, int pair) {
  const int sequence = pair / table.kv_heads;
  if (table.next_slots == nullptr) return min(max(table.lengths[sequence], 0), table.max_slots);
  if (table.now != nullptr && table.now[sequence] == kIdle) return 0;
  return min(max(table.lengths[pair], table.next_slots[pair] + 1), table.max_slots);
}

__device__ inline int tiles_of(int live) { return (live + kSlotsPerTile - 1) / kSlotsPerTile; }

/// A pair, and the data that a loop over its tiles needs.
struct SlotsOfPair {
  int pair, live, newest;
  std::int64_t base;  ///< first element in keys and values

  __device__ SlotsOfPair(const PairTable& table, int head_size, int index)
      : pair(index), live(live_slots(table, index)) {
    if (table.next_slots == nullptr) {
      base = index / table.kv_heads * table.sequence_stride +
             index % table.kv_heads * table.head_stride;
      const int length = table.lengths[index / table.kv_heads];
      newest = length > live ? (length - 1) % table.max_slots : live - 1;
    } else {
      base = table.first_slot[index] * head_size;
      newest = table.next_slots[index];
    }
  }
  __device__ int tiles() const { return tiles_of(live); }
};

/// A tile of the row. The cursor can move to the next pair.
struct TileCursor {
  SlotsOfPair slots;
  int tile;  ///< index in the pair

  /// Moves to the first tile of the next pair, which must exist.
  __device__ void next_pair(const PairTable& table, int head_size) {
    int index = slots.pair + 1;
    while (live_slots(table, index) == 0) ++index;
    slots = SlotsOfPair(table, head_size, index);
    tile = 0;
  }
};

/// The row of all tiles. Each lane of a warp keeps the total number of tiles of some consecutive
/// pairs.
class TileRow {
 public:
  __device__ explicit TileRow(const PairTable& table)
      : table_(table), block_((table.pairs + 31) / 32) {
    const int first = lane() * block_, end = min(first + block_, table.pairs);
#pragma unroll 4
    for (int pair = first; pair < end; ++pair) tiles_ += tiles_of(live_slots(table, pair));
    up_to_ = inclusive_sum(tiles_);
  }
  __device__ int total() const { return __shfl_sync(~0u, up_to_, 31); }

  /// Returns the tile with index `tile` in the row, which must exist. Called by the whole warp.
  __device__ TileCursor at(int tile, int head_size) const {
    const int block = __ffs(static_cast<int>(__ballot_sync(~0u, tile < up_to_))) - 1;
    tile -= __shfl_sync(~0u, up_to_ - tiles_, block);
    for (int first = block * block_;; first += 32) {
      const int pair = first + lane();
      const int mine = pair < table_.pairs ? tiles_of(live_slots(table_, pair)) : 0;
      const int up_to = inclusive_sum(mine);
      const unsigned beyond = __ballot_sync(~0u, tile < up_to);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        tile -= __shfl_sync(~0u, up_to - mine, found);
        return {SlotsOfPair(table_, head_size, first + found), tile};
      }
      tile -= __shfl_sync(~0u, up_to, 31);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int inclusive_sum(int value) {
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, value, step);
      if (lane() >= step) value += below;
    }
    return value;
  }

  const PairTable& table_;
  int block_;
  int tiles_ = 0, up_to_;
};

}  // namespace kvlab::kernels
