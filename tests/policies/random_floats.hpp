// Random floats that include the edge cases of a policy's observations.
#pragma once

#include <cmath>
#include <limits>
#include <random>

namespace kvlab {

/// A probability in [0, 1]: uniform, of random magnitude, denormal, halfway between two multiples
/// of 2^-32, 0 or 1.
inline float random_probability(std::mt19937_64& random) {
  const auto uniform = [&] { return static_cast<float>(random() >> 40) * 0x1p-24f; };
  switch (random() % 8) {
    case 0:
      return 0.0f;
    case 1:
      return 1.0f;
    case 2:
      return std::numeric_limits<float>::denorm_min() * static_cast<float>(random() >> 41);
    case 3:
    case 4:
      return std::ldexp(static_cast<float>(random() % 4096) + 0.5f, -32);
    case 5:
      return std::ldexp(uniform(), -static_cast<int>(random() % 140));
    default:
      return uniform();
  }
}

/// A weight in [0, 1000]. Its product with a probability stays far below 2^20.
inline float random_weight(std::mt19937_64& random) {
  return random_probability(random) * (random() % 2 ? 1.0f : 1000.0f);
}

}  // namespace kvlab
