// Tokens on the tiers of a tier plan, on the device. A pair is a KV head of a sequence. A token's
// data is indexed by its slot (kvlab_cache_view), except for its key and value: these are in a row
// of the token's tier.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/types.hpp"
#include "policies/tiers/quant_block.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxDeviceTiers = 8;
/// Maximum number of query heads per KV head for the tensor core kernels.
inline constexpr int kMaxTierGroup = 8;
inline constexpr std::uint32_t kRowsOfTile =
    16;  ///< rows per tile; the number of rows of a tier is a multiple of it

/// The properties of a format that kernels need.
struct DeviceFormat {
  std::uint8_t key_bits = 16, value_bits = 16;  ///< 16: the cache's type, not quantized
  bool floating = false;

  __host__ __device__ bool exact() const { return key_bits == 16; }
  __host__ __device__ int bits(bool key) const { return key ? key_bits : value_bits; }
  bool operator==(const DeviceFormat&) const = default;
};

/// A tier of a pair. Its rows are stored in tiles of kRowsOfTile rows, one tile after another. A
/// tile contains four parts, in this order: the keys' quantized numbers (arranged by
/// quantized_bit()), the keys' metadata, the values' quantized numbers, the values' metadata.
struct DeviceTier {
  DeviceFormat format;
  /// Number of tokens that the tier may hold. Further rows are for tokens that are waiting for
  /// eviction.
  std::uint32_t slots;
  std::uint32_t rows;       ///< number of rows, a multiple of kRowsOfTile
  std::uint32_t first_row;  ///< index among the pair's rows
  std::int64_t first_byte;
};

/// The tier plan of a pair.
struct DeviceTierPlan {
  int tiers = 0;
  std::int64_t first_row = 0;  ///< index of the pair's first row among all rows
  DeviceTier tier[kMaxDeviceTiers];
};

/// The tier of one of the rows of a pair.
__host__ __device__ inline int tier_of(const DeviceTierPlan& tier_plan, std::uint32_t row) {
  int tier = tier_plan.tiers - 1;
  while (tier > 0 && row < tier_plan.tier[tier].first_row) --tier;
  return tier;
}

/// data_bytes(): bytes of a key or value without metadata. metadata_bytes(): bytes of its metadata.
/// row_bytes(): bytes of a token's key and value with their metadata. `element`: bytes of an
/// element that is not quantized.
__host__ __device__ inline std::int64_t data_bytes(const DeviceFormat& format, bool key,
                                                   int head_size, int element) {
  return format.exact() ? std::int64_t{head_size} * element
                        : std::int64_t{head_size} * format.bits(key) / 8;
}
__host__ __device__ inline std::int64_t metadata_bytes(const DeviceFormat& format, int head_size) {
  constexpr int kBlock = static_cast<int>(kQuantBlock);
  return format.exact() ? 0 : std::int64_t{head_size} / kBlock * (format.floating ? 1 : 4);
}
__host__ __device__ inline std::int64_t row_bytes(const DeviceFormat& format, int head_size,
                                                  int element) {
  return data_bytes(format, true, head_size, element) +
         data_bytes(format, false, head_size, element) + 2 * metadata_bytes(format, head_size);
}

/// A key or value on a tier: the addresses of its elements and of its metadata. For a quantized
/// row, `data` is the address of the whole tile's quantized values.
struct RowPart {
  std::byte *data, *metadata;
  int row;  ///< index in the tile
};
/// `row`: index of the row in the tier.
__host__ __device__ inline RowPart part_of(std::byte* bytes, const DeviceTier& tier,
                                           std::uint32_t row, bool key, int head_size,
                                           int element) {
  const std::int64_t metadata = metadata_bytes(tier.format, head_size),
                     keys = data_bytes(tier.format, true, head_size, element),
                     values = data_bytes(tier.format, false, head_size, element);
  const std::int64_t tile = row / kRowsOfTile * (keys + values + 2 * metadata);
  std::byte* const plane =
      bytes + tier.first_byte + kRowsOfTile * (tile + (key ? 0 : keys + metadata));
  const std::int64_t data = key ? keys : values, tile_row = row % kRowsOfTile;
  return {plane + (tier.format.exact() ? tile_row * data : 0),
          plane + kRowsOfTile * data + tile_row * metadata, static_cast<int>(tile_row)};
}

/// lane_words(): number of 32-bit words of a tile's quantized values that one lane of a warp
/// processes. words_at_once(): number of these words that a lane loads with one instruction.
__host__ __device__ constexpr int lane_words(int bits, int blocks) { return blocks * bits / 2; }
__host__ __device__ constexpr int words_at_once(int words) {
  return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1;
}
/// The bit in a tile at which the quantized number of a channel begins. Numbers that a lane
/// multiplies together are stored together, so that the lane loads whole words. In each block of 32
/// channels, lane l has these numbers. Of keys: eight channels of rows r and r + 8 with r = l / 4.
/// Of values: four channels of rows 2r, 2r + 1, 2r + 8 and 2r + 9 with r = l % 4; a word contains
/// numbers of two neighbouring rows. A byte contains numbers of one row only.
__host__ __device__ inline int quantized_bit(bool key, int bits, int row, int channel, int blocks) {
  constexpr int kBlock = static_cast<int>(kQuantBlock);
  const int b = channel / kBlock, in = channel % kBlock, half = row / 8;
  const int lane = key ? row % 8 * 4 + in / 8 : in / 4 * 4 + row % 8 / 2;
  const int own = key ? in % 8 : in % 4;
  int word = half * blocks + b, bit = key ? 0 : row % 2 * 16;
  if (bits == 8) {
    word = 2 * word + (key ? own % 2 : own / 2);
    bit += (key ? own / 2 : own % 2) * 8;
  } else if (bits == 4) {
    bit += own * 4;
  } else {  // A word holds numbers of two blocks. If the number of blocks is odd, the last block
            // has no partner, and its word holds both of its halves (rows 0 to 7 and 8 to 15).
    const bool odd = (b | 1) >= blocks;
    word = odd ? b : half * (blocks / 2) + b / 2;
    bit += (odd ? half : b % 2) * (key ? 16 : 8) + own * 2;
  }
  const int step_words = words_at_once(lane_words(bits, blocks));
  return ((word / step_words * 32 + lane) * step_words + word % step_words) * 32 + bit;
}

/// The rows of one layer. This struct is in host memory; kernels get a copy.
struct QuantizedCache {
  const DeviceTierPlan* tier_plans;  // [pair]
  std::byte* bytes;                  ///< all rows
  // Both arrays cover all pairs of all layers. Their contents are counted from the pair's first row
  // or slot, so they stay correct if a pair is copied to another sequence.
  std::uint32_t* row_of_slot;  // [slot]: row of the token
  std::uint32_t* slot_of_row;  // [row]: slot of the token; undefined for a row that is not in use
  // [pair, kMaxDeviceTiers]: number of rows in use, from the first row of the tier on. If tier 0 is
  // full, its number includes the row `next_rows`, which the next token overwrites.
  std::int32_t* counts;
  std::uint32_t* next_rows;  // [pair]: row of tier 0 for the next token
  void *newest_keys,
      *newest_values;     // [pair, dim]: not quantized; all layers use this memory in turn
  std::int32_t* extents;  // [pair]: number of rows up to and including the last one in use
  int max_rows;           ///< maximum over the pairs
  int max_row_bytes;      ///< maximum over the rows
  int max_tiers;          ///< maximum over the pairs; if it is 1, a token's row is its slot
  const float* centres = nullptr;  // [pair, dim]: subtracted from stored keys; null: none
};

/// A copy of the older tokens' quantized data during an append of many tokens. read_from_tiers()
/// writes it. compact_to_tiers() stores tokens from it, so that a token that stays on its tier
/// keeps its bits.
struct StagedTiers {
  std::int8_t* tiers;       // [kv_head, slot]; -1: a new token, which is on no tier yet
  std::uint8_t* data;       // [kv_head, slot, key or value, dim]: by channel
  std::uint32_t* metadata;  // [kv_head, slot, key or value, dim / kQuantBlock]
};

}  // namespace kvlab::kernels
