// Sums of probabilities in Q32.32, and requests, without 64-bit arithmetic for each: equal to
// policies/observation.hpp bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "policies/observation.hpp"

namespace kvlab::kernels {

/// The sum of fixed_mass(1, p) over up to 2^15 probabilities 0 <= p <= 2.
///
/// p + 64 rounds p to a multiple of 2^-17; the rest, exact, plus 1.5 * 2^-9 rounds to a multiple of
/// 2^-32, to even as p itself would, since the first part is an even number of those. Both integers
/// are then the low bits of the floats.
class MassSum {
 public:
  __device__ void add(float p) {
    const float high = p + kHigh;
    const float low = (p - (high - kHigh)) + kLow;
    high_ += __float_as_uint(high);
    low_ += __float_as_uint(low);
  }
  /// Q32.32, after `count` calls of add.
  __device__ std::uint64_t total(std::uint32_t count) const {
    const std::uint32_t high = high_ - count * __float_as_uint(kHigh);
    const auto low = static_cast<std::int32_t>(low_ - count * __float_as_uint(kLow));
    return (std::uint64_t{high} << 15) + static_cast<std::uint64_t>(std::int64_t{low});
  }

 private:
  static constexpr float kHigh = 64.0f, kLow = 1.5f / 512;
  std::uint32_t high_ = 0, low_ = 0;  // modulo 2^32
};

/// The least float that requested() accepts as a probability of a row with this largest mass;
/// negative if it accepts 0.
__device__ inline float request_floor(std::uint64_t row_max, std::uint32_t threshold16) {
  const std::uint64_t least = (threshold16 * row_max + 0xffff) >> 16;  // mass
  if (least == 0) return -1;
  // Masses round to `least` from least - 1/2 on, which itself rounds to the even neighbour.
  const std::uint64_t halves = 2 * least - 1;
  const float bound = __ull2float_ru(halves) * 0x1p-33f;
  const bool is_tie = halves < (1u << 24) && least % 2 != 0;
  return is_tie ? __uint_as_float(__float_as_uint(bound) + 1) : bound;
}

}  // namespace kvlab::kernels
