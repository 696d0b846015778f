// Tokens on the tiers of a tier plan, on the device. A token's data is indexed by slot as usual
// (kvlab_cache_view), except that its key and value lie in a row of its tier.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/types.hpp"
#include "policies/tiers/format.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxDeviceTiers = 8;
/// Query heads per KV head at most, for the tensor core kernels
inline constexpr int kMaxTierGroup = 8;
inline constexpr std::uint32_t kRowsOfTile = 16;  ///< a tier's rows are a multiple of it

/// A format's properties, as kernels need them.
struct DeviceFormat {
  std::uint8_t key_bits = 16, value_bits = 16;  ///< 16: the cache's type
  bool floating = false;

  __host__ __device__ bool exact() const { return key_bits == 16; }
  __host__ __device__ int bits(bool key) const { return key ? key_bits : value_bits; }
  bool operator==(const DeviceFormat&) const = default;
};

/// A tier of a pair. Each tile of its rows stores the keys' quantized values (in the order of
/// quantized_bit()), the keys' metadata, the values' quantized values, and the values' metadata.
/// Tiles follow one another.
struct DeviceTier {
  DeviceFormat format;
  /// Tokens that the tier may hold; rows beyond are for tokens that wait for eviction
  std::uint32_t slots;
  std::uint32_t rows;       ///< number of rows, a multiple of kRowsOfTile
  std::uint32_t first_row;  ///< index among the pair's rows
  std::int64_t first_byte;
};

/// The tier plan of a pair.
struct DeviceTierPlan {
  int tiers = 0;
  std::int64_t first_row = 0;  ///< the pair's first row, among all rows
  DeviceTier tier[kMaxDeviceTiers];
};

/// The tier of one of a pair's rows.
__host__ __device__ inline int tier_of(const DeviceTierPlan& tier_plan, std::uint32_t row) {
  int tier = tier_plan.tiers - 1;
  while (tier > 0 && row < tier_plan.tier[tier].first_row) --tier;
  return tier;
}

/// Bytes of a key's or value's quantized values and of their metadata. `element`: bytes of an
/// element in 16 bits.
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

/// A key or a value on a tier: its elements or its tile's quantized values, and its metadata.
struct RowPart {
  std::byte *data, *metadata;
  int row;  ///< index in the tile
};
/// `row`: index in the tier.
__host__ __device__ inline RowPart part_of(std::byte* bytes, const DeviceTier& tier,
                                           std::uint32_t row, bool key, int head_size,
                                           int element) {
  const std::int64_t metadata = metadata_bytes(tier.format, head_size),
                     keys = data_bytes(tier.format, true, head_size, element),
                     values = data_bytes(tier.format, false, head_size, element);
  const std::int64_t tile = row / kRowsOfTile * (keys + values + 2 * metadata);
  std::byte* const plane =
      bytes + tier.first_byte + kRowsOfTile * (tile + (key ? 0 : keys + metadata));
  const std::int64_t data = key ? keys : values, in_tile = row % kRowsOfTile;
  return {plane + (tier.format.exact() ? in_tile * data : 0),
          plane + kRowsOfTile * data + in_tile * metadata, static_cast<int>(in_tile)};
}

/// Words that a warp's lane takes of a tile's quantized values, and how many it loads at once.
__host__ __device__ constexpr int lane_words(int bits, int blocks) { return blocks * bits / 2; }
__host__ __device__ constexpr int words_at_once(int words) {
  return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1;
}
/// The bit in a tile at which a channel's quantized value begins. Each lane finds together the
/// values that it multiplies together: for keys, eight channels of a block of rows r and r + 8,
/// whose bytes are the product's operands; for values, four channels of rows 2r, 2r + 1 and those
/// plus 8, two to a word. No two rows share a byte.
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
  } else {  // a word holds two blocks; for a last odd block, both of its halves
    const bool odd = (b | 1) >= blocks;
    word = odd ? b : half * (blocks / 2) + b / 2;
    bit += (odd ? half : b % 2) * (key ? 16 : 8) + own * 2;
  }
  const int at_once = words_at_once(lane_words(bits, blocks));
  return ((word / at_once * 32 + lane) * at_once + word % at_once) * 32 + bit;
}

/// One layer's rows. In host memory; kernels get a copy.
struct QuantizedCache {
  const DeviceTierPlan* tier_plans;  // [pair]
  std::byte* bytes;                  ///< all rows
  std::uint32_t* row_of_slot;        // [slot]: the token's row among the pair's
  std::uint32_t* slot_of_row;        // [row]: the token's slot
  std::int32_t* counts;      // [pair, kMaxDeviceTiers]: rows in use, counted from a tier's first
  std::uint32_t* next_rows;  // [pair]: row of tier 0 for the next token
  void *newest_keys, *newest_values;  // [pair, dim]: as computed; all layers share this one token
  std::int32_t* extents;              // [pair]: number of rows up to the last in use
  int max_rows;                       ///< of a pair, at most
  int max_row_bytes;                  ///< of a row, at most
  int max_tiers;  ///< of a pair, at most; with one tier a token's row is its slot
};

/// Older tokens while many are appended: the quantized data that their keys and values were read
/// from.
struct StagedTiers {
  std::int8_t* tiers;       // [kv_head, slot]; -1: as computed
  std::uint8_t* data;       // [kv_head, slot, key or value, dim]: by channel
  std::uint32_t* metadata;  // [kv_head, slot, key or value, dim / kQuantBlock]
};

}  // namespace kvlab::kernels
