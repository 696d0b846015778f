// Two float32 as float16 and what that leaves, float16 too: 22 bits, for products on tensor cores.
#pragma once

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

struct HalfParts {
  std::uint32_t kept, left;  ///< two elements each; `low` is first in memory

  /// Elements of at most 65,504. What float16 keeps is cut off, not rounded, so that it is found
  /// by a mask.
  __device__ static HalfParts of(float low, float high) {
    const float kept_low = cut(low), kept_high = cut(high);
    return {pack<__half>(kept_low, kept_high), pack<__half>(low - kept_low, high - kept_high)};
  }

 private:
  __device__ static float cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
};

}  // namespace kvlab::kernels
