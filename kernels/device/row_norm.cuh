// The RMS norm of a row, computed by a thread block of kThreads threads.
#pragma once

#include "kernels/device/reduce.cuh"
#include "kernels/device/vector.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// The sum of the squares of one row, returned in every thread of its block.
template <int kThreads, class T>
__device__ inline float sum_of_squares(const T* row, int hidden, float* sums) {
  float squares = 0;
  for (int at = static_cast<int>(threadIdx.x) * 8; at < hidden; at += kThreads * 8) {
    float value[8];
    load_eight(row + at, value);
#pragma unroll
    for (const float v : value) squares = fmaf(v, v, squares);
  }
  return block_sum(squares, sums);
}

/// The factor by which the norm multiplies a row's elements, in addition to the weights. Returned
/// in every thread of the row's block.
template <int kThreads, class T>
__device__ inline float scale_of(const T* row, const Norm& norm, int hidden, float* sums) {
  const float mean = sum_of_squares<kThreads>(row, hidden, sums) / static_cast<float>(hidden);
  return 1.0f / sqrtf(mean + norm.epsilon);
}

/// Normalizes eight elements of a row, starting at `at`.
template <class T>
__device__ inline void multiply_eight(const Norm& norm, float scale, int at, float (&value)[8]) {
  float weight[8];
  load_eight(static_cast<const T*>(norm.gamma) + at, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = value[i] * scale * (norm.offset + weight[i]);
}

}  // namespace kvlab::kernels
