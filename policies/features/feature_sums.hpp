// Sums over one token's key or value, for the features that are computed: in float32, in index
// order, so that host and device reach equal bits. `x` is read as x(d), widened to float32 from the
// dtype that it is stored in.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
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

/// The cosine of two vectors from their product and their norms; 0 where one of them is 0.
constexpr float cosine_from(float product, float norm, float other_norm) {
  const float norms = norm * other_norm;
  return norms > 0 ? product / norms : 0.0f;
}

}  // namespace kvlab
