// Ranks from numbers that are not integers.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <bit>
#include <cstdint>

namespace kvlab {

/// An integer that orders as `x` does; -0 and 0 are equal. Not for NaN.
constexpr std::uint64_t ordered(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? std::uint32_t{~bits} : bits | 0x8000'0000u;
}
/// Likewise.
constexpr std::uint64_t ordered(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x == 0.0 ? 0.0 : x);
  return bits >> 63 ? ~bits : bits | 0x8000'0000'0000'0000u;
}

}  // namespace kvlab
