#include "traces/base/numeric/code.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "traces/base/numeric/dtype.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kBlock = 32;
constexpr float kLargestE4m3 = 448, kLargestF16 = 65504;

void code_whole(std::span<float> block, float least, float most, int bits) {
  const auto codes = static_cast<float>((1 << bits) - 1);
  const float minimum = round_to(Dtype::f16, least);
  float scale = round_to(Dtype::f16, (most - least) / codes);
  if (scale == 0) scale = f16_to_float(1);
  if (!(std::abs(minimum) <= kLargestF16 && scale <= kLargestF16))
    throw std::invalid_argument("a key or value has " + std::to_string(least) + " to " +
                                std::to_string(most) +
                                " behind the butterflies of a code: fp16, which holds its scale, "
                                "ends at 65504; a ladder of 16 is expected");
  for (float& y : block) {
    const float code = std::clamp(std::rint((y - minimum) / scale), 0.0f, codes);
    const float product = code * scale;
    y = product + minimum;
  }
}

/// To nearest even; |y| <= 448.
float round_to_e4m3(float y) {
  int exponent;
  std::frexp(y, &exponent);  // |y| in [2^(exponent - 1), 2^exponent)
  const float step = std::ldexp(1.0f, std::max(exponent - 1, -6) - 3);
  return std::rint(y / step) * step;
}

void code_floating(std::span<float> block, float largest) {
  if (largest == 0) return;
  int exponent;
  if (std::frexp(largest / kLargestE4m3, &exponent) == 0.5f) --exponent;  // a power of two itself
  const float scale = std::ldexp(1.0f, std::clamp(exponent, -127, 127));
  for (float& y : block) y = round_to_e4m3(y / scale) * scale;
}

template <class Number>
void butterflies_of(std::span<Number> row) {
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

void butterflies(std::span<float> row) { butterflies_of(row); }
void butterflies(std::span<double> row) { butterflies_of(row); }

void code_row(std::span<float> row, int bits, bool floating) {
  for (std::size_t base = 0; base < row.size(); base += kBlock) {
    const std::span<float> block = row.subspan(base, kBlock);
    const auto [least, most] = std::ranges::minmax(block);
    if (floating)
      code_floating(block, std::max(std::abs(least), std::abs(most)));
    else
      code_whole(block, least, most, bits);
  }
}

}  // namespace kvlab
