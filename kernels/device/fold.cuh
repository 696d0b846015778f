// Reduces four values at once over a warp.
#pragma once

#include "kernels/device/reduce.cuh"

namespace kvlab::kernels {

/// Reduces each of the four components over the warp with `fold`, in a fixed order. Lane l gets the
/// result of component l % 4. Uses six shuffles.
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

/// Returns in every lane the four values that lanes `first` to first + 3 have.
__device__ inline float4 gather_lanes(float value, int first) {
  return {__shfl_sync(~0u, value, first), __shfl_sync(~0u, value, first + 1),
          __shfl_sync(~0u, value, first + 2), __shfl_sync(~0u, value, first + 3)};
}

__device__ inline void add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}
__device__ inline void add_product(float4& sum, float a, const float4& x) {
  sum = {fmaf(a, x.x, sum.x), fmaf(a, x.y, sum.y), fmaf(a, x.z, sum.z), fmaf(a, x.w, sum.w)};
}
__device__ inline void raise(float4& maximum, const float4& x) {
  maximum = {fmaxf(maximum.x, x.x), fmaxf(maximum.y, x.y), fmaxf(maximum.z, x.z),
             fmaxf(maximum.w, x.w)};
}
/// Increments each component of `count` if the same component of `x` is at least `bound`.
__device__ inline void count_from(uint4& count, const float4& x, const float4& bound) {
  count.x += x.x >= bound.x ? 1 : 0, count.y += x.y >= bound.y ? 1 : 0;
  count.z += x.z >= bound.z ? 1 : 0, count.w += x.w >= bound.w ? 1 : 0;
}
/// The sums over the warp, returned in every lane.
__device__ inline uint4 warp_sum4(const uint4& count) {
  return {__reduce_add_sync(~0u, count.x), __reduce_add_sync(~0u, count.y),
          __reduce_add_sync(~0u, count.z), __reduce_add_sync(~0u, count.w)};
}

__device__ inline float component(const float4& value, int i) {
  return i == 0 ? value.x : i == 1 ? value.y : i == 2 ? value.z : value.w;
}

}  // namespace kvlab::kernels
