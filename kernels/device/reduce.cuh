// Reductions over a warp and a thread block, in a fixed order, because rounding depends on the
// order. Every lane gets the result. Kernels use CUB instead where the order does not matter and
// NVRTC does not compile the code.
#pragma once

#include <cuda_runtime.h>

namespace kvlab::kernels {

inline constexpr int kWarpSize = 32;

/// The sum over the warp, in every lane.
template <class T>
__device__ inline T warp_sum(T value) {
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

/// The sum over this lane and the lanes below it.
template <class T>
__device__ inline T warp_prefix_sum(T value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, value, distance);
    if (static_cast<int>(threadIdx.x) % kWarpSize >= distance) value += below;
  }
  return value;
}

/// The sum over the thread block, returned in every thread. `shared`: one value per warp, which may
/// be reused after the next barrier.
template <class T>
__device__ inline T block_sum(T value, T* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T sum = 0;
  for (int warp = 0; warp < warps; ++warp) sum += shared[warp];
  return sum;
}

/// The maximum over the thread block. `shared`: see block_sum().
template <class T>
__device__ inline T block_max(T value, T* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  value = warp_max(value);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) value = shared[warp] > value ? shared[warp] : value;
  return value;
}

}  // namespace kvlab::kernels
