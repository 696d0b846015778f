// The exponential function that all code uses. It works on whole registers. The comments in
// softmax.hpp describe what it guarantees.
#pragma once

#include "traces/base/numeric/vectors.hpp"

namespace kvlab {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kRounder = 12582912.0f;            // 1.5 * 2^23: adding it rounds to an integer
constexpr std::int32_t kRounderBits = 0x4b400000;  // the bits of kRounder
// ln 2 in two parts. The first has so few bits that its product with any integer of magnitude below
// 2^13 is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;

/// The shift of a row whose largest logit is `largest`: round(largest / ln 2). The clamp keeps the
/// conversion to an integer defined for damaged logits.
inline std::int32_t shift_below(float largest) {
  const float rounded = largest * kLog2E + kRounder;
  return static_cast<std::int32_t>(
      __builtin_fmaxf(__builtin_fminf(rounded - kRounder, 0x1p23f), -0x1p23f));
}

/// Computes e = exp(s) * 2^-shift. Reduces the argument before it applies the shift, so a different
/// shift scales the result by an exact power of two. Computes N registers side by side to hide
/// latency.
template <int N>
inline __attribute__((always_inline)) void exponentials_of(const Floats* s,
                                                           const std::int32_t* shift, Floats* e) {
  Floats rounded[N], r[N], poly[N];
  for (int n = 0; n < N; ++n)
    rounded[n] = multiply_add(s[n], Floats{} + kLog2E, Floats{} + kRounder);
  for (int n = 0; n < N; ++n) {
    const Floats whole = rounded[n] - kRounder;
    r[n] = multiply_add(whole, Floats{} - kLn2Low, multiply_add(whole, Floats{} - kLn2High, s[n]));
  }
  // Cephes' expf polynomial on [-ln 2 / 2, ln 2 / 2].
  constexpr float kFactors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                1.6666665459e-1f, 5.0000001201e-1f};
  for (int n = 0; n < N; ++n) poly[n] = Floats{} + 1.9875691500e-4f;
  for (const float factor : kFactors)
    for (int n = 0; n < N; ++n) poly[n] = multiply_add(poly[n], r[n], Floats{} + factor);
  for (int n = 0; n < N; ++n) poly[n] = multiply_add(poly[n], r[n] * r[n], r[n]) + 1.0f;
  for (int n = 0; n < N; ++n) {
    Ints bits;
    std::memcpy(&bits, &rounded[n], sizeof bits);
    const std::int32_t max_bits = kRounderBits + shift[n] + 128;  // larger exponents give infinity
    bits = bits < max_bits ? bits : max_bits;
    // kRounderBits need not be subtracted from `bits`: the shift keeps only the lowest nine bits,
    // and those of kRounderBits are 0.
    const std::uint32_t bias = static_cast<std::uint32_t>(127 - shift[n]) << 23;
    const Words power = (reinterpret_cast<Words>(bits) << 23) + bias;  // wraps around
    Floats two;
    std::memcpy(&two, &power, sizeof two);
    const Floats product = poly[n] * two;
    Ints result;
    std::memcpy(&result, &product, sizeof result);
    result &= bits >= kRounderBits + shift[n] - 126;
    std::memcpy(&e[n], &result, sizeof result);
  }
}

inline Floats exponential(Floats s, std::int32_t shift) {
  Floats e;
  exponentials_of<1>(&s, &shift, &e);
  return e;
}

}  // namespace
}  // namespace kvlab
