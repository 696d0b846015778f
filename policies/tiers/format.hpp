// The precision of a live token's key and value: the storage formats of tiers, one per line.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "policies/tiers/quant_block.hpp"

namespace kvlab {

/// How elements are rounded. traces/base/numeric/quantize.hpp has one function for each encoding.
enum class Encoding : std::uint8_t {
  none,        ///< the cache's 16-bit format
  integer,     ///< integers with an fp16 scale and minimum per 32 elements
  e4m3_block,  ///< e4m3 with one power-of-two scale per 32 elements
  e4m3,        ///< e4m3 with scale 1
  ggml,        ///< a format of GGML with a scale per 32 elements: q8_0, q5_0, q4_0
  ggml_min,    ///< a format of GGML with a scale and a minimum per 32 elements: q5_1, q4_1
  nvfp4,       ///< e2m1 with one e4m3 scale per 16 elements
  quanto,      ///< integers with a float32 scale and minimum per 64 elements
};

/// The Hadamard rotation of a row before its elements are rounded
/// (traces/base/numeric/quantize.hpp).
enum class Rotation : std::uint8_t {
  none,
  blocks,  ///< kvlab's rotation, over blocks of 32 channels; the cache computes with rotated rows
  llama,   ///< llama.cpp's rotation (llama_kv_cache::build_input_k_rot()). A key is rotated in
           ///< blocks whose size is the largest power of two that divides the head size, and a
           ///< value in blocks of kLlamaRotation channels
};

/// llama.cpp rotates keys and values only if the head size is a multiple of this.
inline constexpr std::uint32_t kLlamaRotation = 64;

/// A storage format of one row of elements, a token's key or its value.
struct RowFormat {
  std::string_view name;
  int bits;                      ///< bits of an element, without metadata
  std::uint32_t metadata_bytes;  ///< scales and minima of kQuantBlock elements
  Encoding encoding;
  Rotation rotation = Rotation::none;

  constexpr bool exact() const { return encoding == Encoding::none; }
  /// Bytes of kQuantBlock channels.
  constexpr std::uint32_t block_bytes() const {
    return kQuantBlock / 8 * static_cast<std::uint32_t>(bits) + metadata_bytes;
  }
  /// The same, for a cache whose unquantized elements have `element_bytes` bytes.
  constexpr std::uint64_t block_bytes_of(std::uint64_t element_bytes) const {
    return exact() ? kQuantBlock * element_bytes : block_bytes();
  }
  constexpr bool operator==(const RowFormat& other) const { return name == other.name; }
};

/// Formats in order of decreasing precision. fp8_e4m3 is vLLM's and TensorRT-LLM's fp8 with scale
/// 1. q8_0 to q4_0 are llama.cpp's (ggml/src/ggml-quants.c); with `_rot` they are rotated, as
/// llama.cpp does unless LLAMA_ATTN_ROT_DISABLE is set. nvfp4 is NVIDIA's format with scale 1 for
/// the tensor. int4_g64 and int2_g64 are those of transformers' QuantizedCache with the
/// backend optimum-quanto and its default groups of 64, for a model in float32.
inline constexpr RowFormat kRowFormats[] = {
    {"16", 16, 0, Encoding::none},
    {"fp8", 8, 1, Encoding::e4m3_block, Rotation::blocks},
    {"fp8_e4m3", 8, 0, Encoding::e4m3},
    {"8", 8, 4, Encoding::integer, Rotation::blocks},
    {"q8_0_rot", 8, 2, Encoding::ggml, Rotation::llama},
    {"q8_0", 8, 2, Encoding::ggml},
    {"q5_1_rot", 5, 4, Encoding::ggml_min, Rotation::llama},
    {"q5_1", 5, 4, Encoding::ggml_min},
    {"q5_0_rot", 5, 2, Encoding::ggml, Rotation::llama},
    {"q5_0", 5, 2, Encoding::ggml},
    {"4", 4, 4, Encoding::integer, Rotation::blocks},
    {"q4_1_rot", 4, 4, Encoding::ggml_min, Rotation::llama},
    {"q4_1", 4, 4, Encoding::ggml_min},
    {"q4_0_rot", 4, 2, Encoding::ggml, Rotation::llama},
    {"q4_0", 4, 2, Encoding::ggml},
    {"int4_g64", 4, 4, Encoding::quanto},
    {"nvfp4", 4, 2, Encoding::nvfp4},
    {"3", 3, 4, Encoding::integer, Rotation::blocks},
    {"2", 2, 4, Encoding::integer, Rotation::blocks},
    {"int2_g64", 2, 4, Encoding::quanto},
};

/// The row format with this name; null if there is none.
constexpr const RowFormat* find_row_format(std::string_view name) {
  for (const RowFormat& format : kRowFormats)
    if (format.name == name) return &format;
  return nullptr;
}

/// The formats of a token's key and value.
struct KvFormat {
  const RowFormat* key = &kRowFormats[0];
  const RowFormat* value = &kRowFormats[0];
  /// Quantized by KIVI's method, without Hadamard rotation. A cache in this format cannot evict.
  bool kivi = false;

  constexpr bool exact() const { return key->exact() && value->exact(); }
  /// Bytes of kQuantBlock channels of a key and of a value together.
  constexpr std::uint32_t block_bytes() const { return key->block_bytes() + value->block_bytes(); }
  constexpr std::uint64_t block_bytes_of(std::uint64_t element_bytes) const {
    return key->block_bytes_of(element_bytes) + value->block_bytes_of(element_bytes);
  }
  /// Bits per element of keys and values together, with scales and minima.
  constexpr double bits() const { return block_bytes() * 8.0 / (2 * kQuantBlock); }
  /// Whether neither the key nor the value has more precision than in `other`.
  constexpr bool is_at_most(const KvFormat& other) const {
    return key >= other.key && value >= other.value;
  }
  /// A name that find_kv_format() reads, such as `4`, `k4v2` or `q8_0/q4_0`.
  std::string name() const;
  /// An arbitrary order, for maps. It compares pointers into kRowFormats.
  constexpr auto operator<=>(const KvFormat&) const = default;
};

/// The first kKernelFormats are the formats of the CUDA kernels, in the order of kvlab_kv_format
/// (kernels/kvlab.h). Then follow the formats of KIVI (Liu et al. 2024, arXiv:2402.02750), which
/// cannot be combined with other tiers. find_kv_format() also finds other pairs of row formats.
inline constexpr KvFormat kKvFormats[] = {
    {},
    {find_row_format("fp8"), find_row_format("fp8")},
    {find_row_format("8"), find_row_format("8")},
    {find_row_format("4"), find_row_format("4")},
    {find_row_format("4"), find_row_format("2")},
    {find_row_format("2"), find_row_format("2")},
    {find_row_format("4"), find_row_format("4"), true},
    {find_row_format("2"), find_row_format("2"), true},
};
inline constexpr std::size_t kKernelFormats = 6;

/// The index of a format in kKvFormats, if the kernels support it.
constexpr std::optional<std::uint32_t> kernel_format(const KvFormat& format) {
  for (std::uint32_t i = 0; i < kKernelFormats; ++i)
    if (kKvFormats[i] == format) return i;
  return std::nullopt;
}

/// Returns the format with this name. A name is the name of a row format (for keys and values),
/// KEY/VALUE with two such names, `k4v2`, `kivi4` or `kivi2`.
std::optional<KvFormat> find_kv_format(std::string_view name);

/// The names of all row formats, and of all formats, for messages.
std::string row_format_names();
std::string known_formats();

/// KIVI quantizes the keys of kKiviWindow tokens at a time, after RoPE, by channel in groups of
/// kQuantBlock tokens. It quantizes each value separately, as soon as there are kKiviWindow younger
/// tokens. kivi_keys() and kivi_values() return how many of `tokens` keys and values are quantized.
inline constexpr std::uint32_t kKiviWindow = 128;
constexpr std::uint32_t kivi_keys(std::uint32_t tokens) {
  return tokens / kKiviWindow * kKiviWindow;
}
constexpr std::uint32_t kivi_values(std::uint32_t tokens) {
  return tokens < kKiviWindow ? 0 : tokens - kKiviWindow;
}

}  // namespace kvlab
