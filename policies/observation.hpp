// Converts probabilities to the integers that policies observe. Host and device share these
// definitions.
#pragma once

#include <cstdint>

namespace kvlab {

/// weight * p * 2^32, rounded once, to nearest even. `weight` and `p` are float32, so their product
/// is exact in float64; adding 2^52 rounds it to an integer. Requires 0 <= weight * p < 2^20.
constexpr std::uint64_t fixed_mass(float weight, float p) {
  constexpr double kTwo32 = 4294967296.0, kTwo52 = 4503599627370496.0;
  const double scaled = static_cast<double>(weight) * static_cast<double>(p) * kTwo32;
  return static_cast<std::uint64_t>((scaled + kTwo52) - kTwo52);
}

/// The request threshold as an integer: tau * 2^16, rounded to nearest. H2O (section 3.1) treats a
/// probability as zero if it is below 1% of the largest probability of its row.
constexpr std::uint32_t request_threshold16(double tau) {
  const double scaled = tau * 65536.0;
  const auto whole = static_cast<std::uint32_t>(scaled);
  return scaled - whole < 0.5 ? whole : whole + 1;
}

/// Whether a query head requests a token, because its mass is at least tau times the row's largest
/// mass `row_max`. Both masses are unweighted.
constexpr bool is_requested(std::uint64_t mass, std::uint64_t row_max, std::uint32_t threshold16) {
  return (mass << 16) >= threshold16 * row_max;
}

}  // namespace kvlab
