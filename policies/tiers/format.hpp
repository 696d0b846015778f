// How exactly a live token's key and value are kept: a tier's format, one line each.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvlab {

/// Channels that share a scale.
inline constexpr std::uint32_t kQuantBlock = 32;

/// The bits of an element. 16 are those of the cache itself; fewer are quantized values of blocks
/// of channels after a 32-point Hadamard rotation (traces/base/numeric/quantize.hpp).
struct KvFormat {
  std::string_view name;
  int key_bits, value_bits;
  bool floating = false;  ///< e4m3 and a power of two a block; else a fp16 scale and minimum
  bool kivi = false;      ///< every token stays, as in KIVI; without a Hadamard rotation

  constexpr bool exact() const { return key_bits == 16; }
  /// Bytes of a block of channels of a key and of a value.
  constexpr std::uint32_t block_bytes() const {
    return part_bytes(key_bits) + part_bytes(value_bits);
  }
  constexpr bool operator==(const KvFormat&) const = default;

  /// Likewise of a key or a value alone.
  constexpr std::uint32_t part_bytes(int bits) const {
    const std::uint32_t metadata = bits == 16 ? 0 : floating ? 1 : 4;
    return kQuantBlock / 8 * static_cast<std::uint32_t>(bits) + metadata;
  }
};

/// From the most exact on: tiers are in this order. KIVI (Liu et al. 2024, arXiv:2402.02750) stands
/// alone.
inline constexpr KvFormat kKvFormats[] = {
    {"16", 16, 16},
    {"fp8", 8, 8, true},
    {"8", 8, 8},
    {"4", 4, 4},
    {"k4v2", 4, 2},
    {"2", 2, 2},
    {"kivi4", 4, 4, false, true},
    {"kivi2", 2, 2, false, true},
};

/// KIVI quantizes so many tokens' keys at once, by channel in groups of kQuantBlock tokens, after
/// RoPE; and each value by itself as it becomes older than so many others. These are how many are
/// quantized behind `tokens`.
inline constexpr std::uint32_t kKiviWindow = 128;
constexpr std::uint32_t kivi_keys(std::uint32_t tokens) {
  return tokens / kKiviWindow * kKiviWindow;
}
constexpr std::uint32_t kivi_values(std::uint32_t tokens) {
  return tokens < kKiviWindow ? 0 : tokens - kKiviWindow;
}

}  // namespace kvlab
