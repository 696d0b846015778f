// Splits each of two float32 numbers into its value in a 2-byte type and the remainder in the same
// type, for products on tensor cores.
#pragma once

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// Two numbers, each as two bf16 parts, which together have 16 bits of precision.
struct Bf16Parts {
  std::uint32_t kept, left;

  __device__ static Bf16Parts split(float low, float high) {
    const std::uint32_t kept = pack<__nv_bfloat16>(low, high);
    const float2 rounded = unpack<__nv_bfloat16>(kept);
    return {kept, pack<__nv_bfloat16>(low - rounded.x, high - rounded.y)};
  }
};

/// Two numbers, each as two float16 parts, which together have 22 bits of precision.
struct HalfParts {
  std::uint32_t kept, left;  ///< two elements each; `low` comes first in memory

  /// Supports numbers up to 65,504. The kept part is truncated instead of rounded, so that a bit
  /// mask can extract it.
  __device__ static HalfParts split(float low, float high) {
    const float kept_low = cut(low), kept_high = cut(high);
    return {pack<__half>(kept_low, kept_high), pack<__half>(low - kept_low, high - kept_high)};
  }

 private:
  __device__ static float cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
};

}  // namespace kvlab::kernels
