// Reductions over a warp and a block, in a fixed order.
#pragma once

#include <cuda_runtime.h>

namespace kvlab::kernels {

inline constexpr int kWarpSize = 32;

/// The sum over the warp, in every lane.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

template <class T>
__device__ inline T warp_max(T value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

/// The sum over the block, in every thread. `shared`: a float for each warp; free again after the
/// next barrier.
__device__ inline float block_sum(float value, float* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < warps; ++warp) sum += shared[warp];
  return sum;
}

}  // namespace kvlab::kernels
