// The one exponential, a register at a time; see softmax.hpp for what it promises.
#pragma once

#include "traces/numeric/vectors.hpp"

namespace kvlab {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kRounder = 12582912.0f;            // 1.5 * 2^23: adding it rounds to an integer
constexpr std::int32_t kRounderBits = 0x4b400000;  // the bits of kRounder
// ln 2 in two parts, the first with few enough bits that its product with |i| < 2^13 is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;

/// The argument is reduced before the shift is applied, so that another shift scales the result by
/// an exact power of two.
inline Floats exponential(Floats s, std::int32_t shift) {
  const Floats rounded = s * kLog2E + kRounder;
  const Floats whole = rounded - kRounder;
  const Floats r = (s - whole * kLn2High) - whole * kLn2Low;
  // Cephes' expf polynomial on [-ln 2 / 2, ln 2 / 2].
  Floats poly = r * 1.9875691500e-4f + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = poly * (r * r) + r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  const Ints exponent = bits - kRounderBits - shift;
  const Ints power = (exponent + 127) << 23;
  Floats two;
  std::memcpy(&two, &power, sizeof two);
  const Floats e = poly * two;
  Ints result;
  std::memcpy(&result, &e, sizeof result);
  result &= exponent >= -126;
  Floats out;
  std::memcpy(&out, &result, sizeof out);
  return out;
}

}  // namespace
}  // namespace kvlab
