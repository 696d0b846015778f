#include "traces/base/numeric/quantize.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "traces/base/numeric/dtype.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kBlock = 32, kNvBlock = 16, kQuantoGroup = 64;
constexpr float kLargestE4m3 = 448, kLargestE2m1 = 6, kLargestF16 = 65504;

void refuse_nan(std::span<const float> row) {
  if (std::ranges::any_of(row, [](float x) { return std::isnan(x); }))
    throw std::invalid_argument("a key or value is NaN, which no format holds");
}

/// Rounds a scale or minimum of GGML to fp16.
float ggml_f16(float x) {
  const float rounded = round_to(Dtype::f16, x);
  if (!(std::abs(rounded) <= kLargestF16))
    throw std::invalid_argument("a key or value has the scale " + std::to_string(x) +
                                ", which is too large for fp16 (at most 65504); use tier 16");
  return rounded;
}

void quantize_int(std::span<float> block, float lowest, float highest, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float minimum = round_to(Dtype::f16, lowest);
  float scale = round_to(Dtype::f16, (highest - lowest) / levels);
  if (scale == 0) scale = f16_to_float(1);
  if (!(std::abs(minimum) <= kLargestF16 && scale <= kLargestF16))
    throw std::invalid_argument("a key or value has " + std::to_string(lowest) + " to " +
                                std::to_string(highest) +
                                " after the Hadamard rotation, which is too large for its fp16 "
                                "scale (at most 65504); use tier 16");
  for (float& y : block) {
    const float quantized = std::clamp(std::rint((y - minimum) / scale), 0.0f, levels);
    const float product = quantized * scale;
    y = product + minimum;
  }
}

/// Rounds `y` to nearest even, in a floating-point format with `mantissa` mantissa bits and the
/// smallest normal number 2^min_exponent. `y` must not exceed the format's largest magnitude.
float round_mantissa(float y, int min_exponent, int mantissa) {
  int exponent;
  std::frexp(y, &exponent);  // |y| in [2^(exponent - 1), 2^exponent)
  const float step = std::ldexp(1.0f, std::max(exponent - 1, min_exponent) - mantissa);
  return std::rint(y / step) * step;
}

/// Requires |y| <= 448.
float round_to_e4m3(float y) { return round_mantissa(y, -6, 3); }
/// Magnitudes above 6 become 6.
float round_to_e2m1(float y) {
  return round_mantissa(std::clamp(y, -kLargestE2m1, kLargestE2m1), 0, 1);
}

void quantize_fp8(std::span<float> block, float largest) {
  if (largest == 0) return;
  int exponent;
  // If `largest` is an exact power of two times kLargestE4m3, that power is the scale. In this case
  // frexp() returns an exponent that is 1 too high.
  if (std::frexp(largest / kLargestE4m3, &exponent) == 0.5f) --exponent;
  const float scale = std::ldexp(1.0f, std::clamp(exponent, -127, 127));
  for (float& y : block) y = round_to_e4m3(y / scale) * scale;
}

template <class Number>
void rotate_blocks(std::span<Number> row, std::size_t block) {
  for (std::size_t base = 0; base < row.size(); base += block)
    for (std::size_t apart = 1; apart < block; apart *= 2)
      for (std::size_t i = base; i < base + block; ++i)
        if ((i & apart) == 0) {
          const Number a = row[i], b = row[i + apart];
          row[i] = a + b;
          row[i + apart] = a - b;
        }
}

}  // namespace

void hadamard_rotate(std::span<float> row) { rotate_blocks(row, kBlock); }
void hadamard_rotate(std::span<double> row) { rotate_blocks(row, kBlock); }

void hadamard_rotate_orthonormal(std::span<float> row, std::size_t block) {
  rotate_blocks(row, block);
  const float factor = 1 / std::sqrt(static_cast<float>(block));
  for (float& x : row) x *= factor;
}

void quantize_row(std::span<float> row, int bits, bool floating) {
  refuse_nan(row);
  for (std::size_t base = 0; base < row.size(); base += kBlock) {
    const std::span<float> block = row.subspan(base, kBlock);
    const auto [lowest, highest] = std::ranges::minmax(block);
    if (floating)
      quantize_fp8(block, std::max(std::abs(lowest), std::abs(highest)));
    else
      quantize_int(block, lowest, highest, bits);
  }
}

void quantize_e4m3(std::span<float> row) {
  refuse_nan(row);
  for (float& x : row) x = round_to_e4m3(std::clamp(x, -kLargestE4m3, kLargestE4m3));
}

void quantize_ggml(std::span<float> row, int bits) {
  refuse_nan(row);
  const auto half = static_cast<float>(1 << (bits - 1)), levels = 2 * half - 1;
  for (std::size_t base = 0; base < row.size(); base += kBlock) {
    const std::span<float> block = row.subspan(base, kBlock);
    // The first of the elements with the largest magnitude.
    const float largest = *std::ranges::max_element(block, {}, [](float x) { return std::abs(x); });
    // With 8 bits the levels are symmetric. With fewer bits the largest element gets the lowest
    // level.
    const float scale = bits == 8 ? std::abs(largest) / (half - 1) : largest / -half;
    const float stored = ggml_f16(scale);
    if (stored == 0) {  // also avoids the inverse of a subnormal scale, which is infinite
      std::ranges::fill(block, 0.0f);
      continue;
    }
    const float inverse = 1 / scale;
    for (float& x : block) {
      const float product = x * inverse;
      const float level = bits == 8 ? std::round(product)
                                    : std::min(std::trunc(product + (half + 0.5f)), levels) - half;
      x = level * stored;
    }
  }
}

void quantize_ggml_min(std::span<float> row, int bits) {
  refuse_nan(row);
  const auto levels = static_cast<float>((1 << bits) - 1);
  for (std::size_t base = 0; base < row.size(); base += kBlock) {
    const std::span<float> block = row.subspan(base, kBlock);
    const auto [lowest, highest] = std::ranges::minmax(block);
    const float scale = (highest - lowest) / levels;
    const float stored = ggml_f16(scale), minimum = ggml_f16(lowest);
    if (stored == 0) {
      std::ranges::fill(block, minimum);
      continue;
    }
    const float inverse = 1 / scale;
    for (float& x : block) {
      const float offset = (x - lowest) * inverse;
      const float product = std::min(std::trunc(offset + 0.5f), levels) * stored;
      x = product + minimum;
    }
  }
}

void quantize_nvfp4(std::span<float> row) {
  refuse_nan(row);
  for (std::size_t base = 0; base < row.size(); base += kNvBlock) {
    const std::span<float> block = row.subspan(base, std::min(kNvBlock, row.size() - base));
    float largest = 0;
    for (const float x : block) largest = std::max(largest, std::abs(x));
    const float scale = round_to_e4m3(std::min(largest / kLargestE2m1, kLargestE4m3));
    for (float& x : block) x = scale == 0 ? 0 : round_to_e2m1(x / scale) * scale;
  }
}

void quantize_quanto(std::span<float> row, int bits) {
  refuse_nan(row);
  if (row.size() % kQuantoGroup != 0)
    throw std::invalid_argument(
        "int4_g64 and int2_g64 have groups of 64 elements, so they need a "
        "head size that is a multiple of 64, not " +
        std::to_string(row.size()));
  const auto levels = static_cast<float>((1 << bits) - 1);
  for (std::size_t base = 0; base < row.size(); base += kQuantoGroup) {
    const std::span<float> group = row.subspan(base, kQuantoGroup);
    const auto [lowest, highest] = std::ranges::minmax(group);
    const float scale = (highest - lowest) / levels;
    if (!std::isfinite(scale))
      throw std::invalid_argument("a key or value has " + std::to_string(lowest) + " to " +
                                  std::to_string(highest) +
                                  ", which is too large for a float32 scale; use tier 16");
    for (float& x : group) {
      const float level =
          scale == 0 ? 0 : std::clamp(std::rint((x - lowest) / scale), 0.0f, levels);
      const float product = level * scale;
      x = product + lowest;
    }
  }
}

}  // namespace kvlab
