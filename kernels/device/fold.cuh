// Four values at once, folded over a warp.
#pragma once

#include "kernels/device/reduce.cuh"

namespace kvlab::kernels {

/// Lane l gets the fold over the warp of component l % 4, in a fixed order. Six shuffles.
template <class Fold>
__device__ inline float warp_fold4(const float4& value, Fold fold) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const bool odd = lane & 1, high = lane & 2;
  const float a = fold(odd ? value.y : value.x, __shfl_xor_sync(~0u, odd ? value.x : value.y, 1));
  const float b = fold(odd ? value.w : value.z, __shfl_xor_sync(~0u, odd ? value.z : value.w, 1));
  float folded = fold(high ? b : a, __shfl_xor_sync(~0u, high ? a : b, 2));
#pragma unroll
  for (int distance = 4; distance < kWarpSize; distance *= 2)
    folded = fold(folded, __shfl_xor_sync(~0u, folded, distance));
  return folded;
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// The four components that lanes 0 to 3 hold, from lane `first` on, in every lane.
__device__ inline float4 of_lanes(float value, int first) {
  return {__shfl_sync(~0u, value, first), __shfl_sync(~0u, value, first + 1),
          __shfl_sync(~0u, value, first + 2), __shfl_sync(~0u, value, first + 3)};
}

__device__ inline float component(const float4& value, int i) {
  return i == 0 ? value.x : i == 1 ? value.y : i == 2 ? value.z : value.w;
}

}  // namespace kvlab::kernels
