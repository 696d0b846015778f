// Replaces this CUDA header, which NVRTC lacks, with what kvlab's kernels use. It also compiles
// faster.
#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
};
__device__ inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  __nv_bfloat16 to;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
  return to;
}
