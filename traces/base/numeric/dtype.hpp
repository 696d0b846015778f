// Element types of checkpoints and traces, and their conversion to and from float32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace kvlab {

enum class Dtype { f32, f16, bf16, i32 };

constexpr std::size_t bytes_of(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::i32 ? 4 : 2;
}

/// Names in safetensors: F32, F16, BF16, I32.
std::string_view safetensors_name(Dtype dtype);
std::optional<Dtype> dtype_from_safetensors(std::string_view name);
/// Names in PyTorch: float32, float16, bfloat16 (also with a leading "torch.").
std::string_view torch_name(Dtype dtype);
std::optional<Dtype> dtype_from_torch(std::string_view name);

constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounds to nearest even; NaN stays NaN.
constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float f16_to_float(std::uint16_t bits);
/// Rounds to nearest even; overflow becomes infinity.
std::uint16_t float_to_f16(float value);

/// `value` rounded to `dtype` and back.
float round_to(Dtype dtype, float value);

/// Converts `count` elements of `dtype` (f32, f16, bf16) at `from`, which need not be aligned.
void to_float(Dtype dtype, const std::byte* from, std::size_t count, float* to);
void from_float(Dtype dtype, const float* from, std::size_t count, std::byte* to);
/// Index of the first element of `dtype` (f32, f16, bf16) that is infinite or NaN; the number of
/// elements if there is none.
std::size_t first_not_finite(Dtype dtype, std::span<const std::byte> elements);

}  // namespace kvlab
