#include "traces/base/numeric/dtype.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace kvlab {
namespace {

struct Names {
  Dtype dtype;
  std::string_view safetensors, torch;
};
constexpr std::array<Names, 4> kNames{{{Dtype::f32, "F32", "float32"},
                                       {Dtype::f16, "F16", "float16"},
                                       {Dtype::bf16, "BF16", "bfloat16"},
                                       {Dtype::i32, "I32", "int32"}}};

template <class Convert>
void convert_halves(const std::byte* from, std::size_t count, float* to, Convert convert) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    to[i] = convert(bits);
  }
}

template <class Convert>
void store_halves(const float* from, std::size_t count, std::byte* to, Convert convert) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t bits = convert(from[i]);
    std::memcpy(to + 2 * i, &bits, 2);
  }
}

/// Index of the first element in which all bits of `bits` are set; the number of elements if there
/// is none.
template <class Bits>
std::size_t first_with(Bits bits, std::span<const std::byte> elements) {
  constexpr std::size_t kAtOnce = 512;
  const std::size_t count = elements.size() / sizeof(Bits);
  Bits block[kAtOnce];
  for (std::size_t first = 0; first < count; first += kAtOnce) {
    const std::size_t here = std::min(kAtOnce, count - first);
    std::memcpy(block, elements.data() + first * sizeof(Bits), here * sizeof(Bits));
    const auto has = [bits](Bits x) { return (x & bits) == bits; };
    Bits any = 0;
    for (std::size_t i = 0; i < here; ++i) any = static_cast<Bits>(any | (has(block[i]) ? 1 : 0));
    if (any)
      return first + static_cast<std::size_t>(std::find_if(block, block + here, has) - block);
  }
  return count;
}

}  // namespace

std::string_view safetensors_name(Dtype dtype) {
  for (const Names& n : kNames)
    if (n.dtype == dtype) return n.safetensors;
  return "?";
}

std::optional<Dtype> dtype_from_safetensors(std::string_view name) {
  for (const Names& n : kNames)
    if (n.safetensors == name) return n.dtype;
  return std::nullopt;
}

std::string_view torch_name(Dtype dtype) {
  for (const Names& n : kNames)
    if (n.dtype == dtype) return n.torch;
  return "?";
}

std::optional<Dtype> dtype_from_torch(std::string_view name) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  for (const Names& n : kNames)
    if (n.torch == name) return n.dtype;
  return std::nullopt;
}

float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f80'0000u | fraction << 13);
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f)  // subnormal: a multiple of 2^-24
    return static_cast<std::uint16_t>(
        sign | static_cast<std::uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  const std::uint32_t abs_bits = bits & 0x7fff'ffffu;
  const std::uint32_t rounded = abs_bits + 0xfffu + (abs_bits >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::bf16) return bf16_to_float(float_to_bf16(value));
  if (dtype == Dtype::f16) return f16_to_float(float_to_f16(value));
  return value;
}

void to_float(Dtype dtype, const std::byte* from, std::size_t count, float* to) {
  if (dtype == Dtype::bf16) return convert_halves(from, count, to, bf16_to_float);
  if (dtype == Dtype::f16) return convert_halves(from, count, to, f16_to_float);
  std::memcpy(to, from, 4 * count);
}

void from_float(Dtype dtype, const float* from, std::size_t count, std::byte* to) {
  if (dtype == Dtype::bf16) return store_halves(from, count, to, float_to_bf16);
  if (dtype == Dtype::f16) return store_halves(from, count, to, float_to_f16);
  std::memcpy(to, from, 4 * count);
}

std::size_t first_not_finite(Dtype dtype, std::span<const std::byte> elements) {
  if (dtype == Dtype::f32) return first_with<std::uint32_t>(0x7f80'0000u, elements);
  return first_with<std::uint16_t>(dtype == Dtype::f16 ? 0x7c00u : 0x7f80u, elements);
}

}  // namespace kvlab
