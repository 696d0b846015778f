// Fixed-point arithmetic that policies share: shares of Q32.32 masses, bit-identical on host and
// device.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

namespace kvlab {

/// Converts a share in [0, 1] to units of 2^-32, rounded to nearest. Adding 2^52 rounds to an
/// integer.
constexpr std::uint64_t share32(double share) {
  constexpr double kTwo32 = 4294967296.0, kTwo52 = 4503599627370496.0;
  return static_cast<std::uint64_t>((share * kTwo32 + kTwo52) - kTwo52);
}

/// mass * share / 2^32, rounded down, for share <= 2^32. No intermediate result is rounded or
/// overflows.
constexpr std::uint64_t part_of(std::uint64_t mass, std::uint64_t share) {
  return (mass >> 32) * share + ((mass & 0xffff'ffffu) * share >> 32);
}

/// base^n by squaring, with the same products in the same order on host and device.
constexpr double power(double base, std::uint32_t n) {
  if (n == 1) return base;  // fast path for one decoded token
  double result = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace kvlab
