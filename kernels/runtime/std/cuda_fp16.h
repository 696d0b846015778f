// Replaces this CUDA header, which NVRTC lacks, with what kvlab's kernels use. It also compiles
// faster.
#pragma once
struct __half {
  unsigned short bits;
};
struct __half2 {
  __half x, y;
};
__device__ inline float __half2float(__half value) {
  float to;
  asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(value.bits));
  return to;
}
__device__ inline __half __float2half_rn(float value) {
  __half to;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
  return to;
}
__device__ inline float2 __half22float2(__half2 value) {
  return {__half2float(value.x), __half2float(value.y)};
}
