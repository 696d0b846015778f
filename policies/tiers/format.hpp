// The precision of a live token's key and value: the storage formats of tiers, one per line.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvlab {

/// Number of channels that share a scale.
inline constexpr std::uint32_t kQuantBlock = 32;

/// Bits per element of a key and of a value. 16 is the cache's 16-bit format. Elements of fewer
/// bits are quantized in blocks of channels after a 32-point Hadamard rotation
/// (traces/base/numeric/quantize.hpp).
struct KvFormat {
  std::string_view name;
  int key_bits, value_bits;
  /// Whether elements are e4m3 with one power-of-two scale per block. Otherwise they are integers
  /// with an fp16 scale and minimum.
  bool floating = false;
  bool kivi = false;  ///< quantized as KIVI does, without Hadamard rotation; never evicts

  constexpr bool exact() const { return key_bits == 16; }
  /// Bytes of one block of channels of a key and of a value together.
  constexpr std::uint32_t block_bytes() const {
    return part_bytes(key_bits) + part_bytes(value_bits);
  }
  constexpr bool operator==(const KvFormat&) const = default;

  /// Bytes of one block of channels of only a key or only a value.
  constexpr std::uint32_t part_bytes(int bits) const {
    const std::uint32_t metadata = bits == 16 ? 0 : floating ? 1 : 4;
    return kQuantBlock / 8 * static_cast<std::uint32_t>(bits) + metadata;
  }
};

/// Formats in order of decreasing precision, which is also the order of a plan's tiers. KIVI (Liu
/// et al. 2024, arXiv:2402.02750) cannot be combined with other tiers.
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

/// KIVI quantizes the keys of kKiviWindow tokens at a time, after RoPE, by channel in groups of
/// kQuantBlock tokens. It quantizes each value separately, once kKiviWindow younger tokens exist.
/// kivi_keys() and kivi_values() return how many of `tokens` keys and values are quantized.
inline constexpr std::uint32_t kKiviWindow = 128;
constexpr std::uint32_t kivi_keys(std::uint32_t tokens) {
  return tokens / kKiviWindow * kKiviWindow;
}
constexpr std::uint32_t kivi_values(std::uint32_t tokens) {
  return tokens < kKiviWindow ? 0 : tokens - kKiviWindow;
}

}  // namespace kvlab
