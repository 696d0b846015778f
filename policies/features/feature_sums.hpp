// Sums over one token's key or value, for the built-in features. They are computed in float32 in
// index order, so host and device give the same bits. `x(d)` returns element d, widened to float32
// from its stored dtype.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

namespace kvlab {

template <class X>
constexpr float sum_of_squares(std::uint32_t size, X x) {
  float sum = 0;
  for (std::uint32_t d = 0; d < size; ++d) sum += x(d) * x(d);
  return sum;
}

template <class X>
constexpr float sum_of_magnitudes(std::uint32_t size, X x) {
  float sum = 0;
  for (std::uint32_t d = 0; d < size; ++d) sum += x(d) < 0 ? -x(d) : x(d);
  return sum;
}

template <class X, class Y>
constexpr float sum_of_products(std::uint32_t size, X x, Y y) {
  float sum = 0;
  for (std::uint32_t d = 0; d < size; ++d) sum += x(d) * y(d);
  return sum;
}

/// The cosine of two vectors from their dot product and their norms; 0 if a norm is 0.
constexpr float cosine_from(float product, float norm, float other_norm) {
  const float norms = norm * other_norm;
  return norms > 0 ? product / norms : 0.0f;
}

}  // namespace kvlab
