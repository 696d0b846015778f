#include "traces/base/numeric/quantize.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "traces/base/numeric/dtype.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kBlock = 32;
constexpr float kLargestE4m3 = 448, kLargestF16 = 65504;

void quantize_int(std::span<float> block, float least, float most, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float minimum = round_to(Dtype::f16, least);
  float scale = round_to(Dtype::f16, (most - least) / levels);
  if (scale == 0) scale = f16_to_float(1);
  if (!(std::abs(minimum) <= kLargestF16 && scale <= kLargestF16))
    throw std::invalid_argument("a key or value has " + std::to_string(least) + " to " +
                                std::to_string(most) +
                                " after the Hadamard rotation, which is too large for its fp16 "
                                "scale (at most 65504); use tier 16");
  for (float& y : block) {
    const float quantized = std::clamp(std::rint((y - minimum) / scale), 0.0f, levels);
    const float product = quantized * scale;
    y = product + minimum;
  }
}

/// Rounds to nearest even; requires |y| <= 448.
float round_to_e4m3(float y) {
  int exponent;
  std::frexp(y, &exponent);  // |y| in [2^(exponent - 1), 2^exponent)
  const float step = std::ldexp(1.0f, std::max(exponent - 1, -6) - 3);
  return std::rint(y / step) * step;
}

void quantize_fp8(std::span<float> block, float largest) {
  if (largest == 0) return;
  int exponent;
  // `largest` is an exact power of two times kLargestE4m3.
  if (std::frexp(largest / kLargestE4m3, &exponent) == 0.5f) --exponent;
  const float scale = std::ldexp(1.0f, std::clamp(exponent, -127, 127));
  for (float& y : block) y = round_to_e4m3(y / scale) * scale;
}

template <class Number>
void rotate_blocks(std::span<Number> row) {
  for (std::size_t base = 0; base < row.size(); base += kBlock)
    for (std::size_t apart = 1; apart < kBlock; apart *= 2)
      for (std::size_t i = base; i < base + kBlock; ++i)
        if ((i & apart) == 0) {
          const Number a = row[i], b = row[i + apart];
          row[i] = a + b;
          row[i + apart] = a - b;
        }
}

}  // namespace

void hadamard_rotate(std::span<float> row) { rotate_blocks(row); }
void hadamard_rotate(std::span<double> row) { rotate_blocks(row); }

void quantize_row(std::span<float> row, int bits, bool floating) {
  for (std::size_t base = 0; base < row.size(); base += kBlock) {
    const std::span<float> block = row.subspan(base, kBlock);
    const auto [least, most] = std::ranges::minmax(block);
    if (floating)
      quantize_fp8(block, std::max(std::abs(least), std::abs(most)));
    else
      quantize_int(block, least, most, bits);
  }
}

}  // namespace kvlab
