// Sums of probabilities in Q32.32, and request counts, without 64-bit arithmetic per probability.
// The results equal those of policies/observation.hpp, bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "policies/observation.hpp"

namespace kvlab::kernels {

/// The sum of fixed_mass(1, p) over at most 2^14 probabilities with 0 <= p <= 1.5 (rounding may
/// give a p above 1).
///
/// add() splits p into two parts. Adding 64 to p rounds p to a multiple of 2^-17, the first part.
/// The remainder, p minus the first part, is exact. Adding 1.5 * 2^-9 to the remainder rounds it to
/// a multiple of 2^-32, the second part. A tie is rounded to even, as it would be for p itself,
/// because the first part is an even multiple of 2^-32. The low bits of the two float sums are the
/// two parts as integers, so adding these bits adds the parts.
class MassSum {
 public:
  constexpr void add(float p) {
    const float high = p + kHigh;
    const float low = (p - (high - kHigh)) + kLow;
    high_ += std::bit_cast<std::uint32_t>(high);
    low_ += std::bit_cast<std::uint32_t>(low);
  }
  /// Use raise() instead of add() to keep the largest of the given probabilities. Probabilities
  /// must not be negative.
  constexpr void raise(float p) {
    const auto bits = std::bit_cast<std::uint32_t>(
        p);  // the bits of floats >= 0 have the same order as the floats
    high_ = bits > high_ ? bits : high_;
  }
  constexpr float largest() const { return std::bit_cast<float>(high_); }
  /// Q32.32, after `count` calls of add.
  constexpr std::uint64_t total(std::uint32_t count) const {
    const std::uint32_t high = high_ - count * std::bit_cast<std::uint32_t>(kHigh);
    const auto low = static_cast<std::int32_t>(low_ - count * std::bit_cast<std::uint32_t>(kLow));
    return (std::uint64_t{high} << 15) + static_cast<std::uint64_t>(std::int64_t{low});
  }

 private:
  static constexpr float kHigh = 64.0f, kLow = 1.5f / 512;
  std::uint32_t high_ = 0, low_ = 0;  // modulo 2^32
};

/// The lowest probability that counts as a request in a row whose largest mass is `row_max`.
/// Negative if a probability of 0 counts. Requires row_max <= 2^33 and threshold16 <= 2^16.
constexpr float request_floor(std::uint64_t row_max, std::uint32_t threshold16) {
  const std::uint64_t min_mass = (threshold16 * row_max + 0xffff) >> 16;  // mass
  if (min_mass == 0) return -1;
  // Masses above min_mass - 1/2 round to at least `min_mass`. min_mass - 1/2 itself rounds to its
  // even neighbour.
  const std::uint64_t halves = 2 * min_mass - 1;
  const double bound = static_cast<double>(halves) * 0x1p-33;
  const auto nearest = static_cast<float>(bound);
  const bool enough = min_mass % 2 == 0 ? nearest >= bound : nearest > bound;
  return enough ? nearest : std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) + 1);
}

}  // namespace kvlab::kernels
