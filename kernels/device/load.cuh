// Loads neighbouring elements of a type known at run time, as float32.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Elements `at` and at + 1; `at` must be even.
__device__ inline float2 load2(const void* data, Type type, std::int64_t at) {
  if (type == KVLAB_F32)
    return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + at);
  const auto bits =
      *reinterpret_cast<const std::uint32_t*>(static_cast<const char*>(data) + 2 * at);
  if (type == KVLAB_BF16) return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

__device__ inline float load1(const void* data, Type type, std::int64_t at) {
  const float2 two = load2(data, type, at & ~std::int64_t{1});
  return at & 1 ? two.y : two.x;
}

/// Elements `at` to at + 3; `at` must be a multiple of 4.
__device__ inline float4 load4(const void* data, Type type, std::int64_t at) {
  if (type == KVLAB_F32)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
  const auto bits = *reinterpret_cast<const uint2*>(static_cast<const char*>(data) + 2 * at);
  if (type == KVLAB_BF16)
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
            __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x)),
               high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

/// Elements 2n and 2n + 1 of the four elements in `bits`, which have a 2-byte type. In the next
/// overload they are float32.
__device__ inline float2 two_of(const uint2& bits, Type type, int n) {
  const std::uint32_t two = n == 0 ? bits.x : bits.y;
  if (type == KVLAB_BF16) return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}
__device__ inline float2 two_of(const uint4& bits, Type, int n) {
  return n == 0 ? float2{__uint_as_float(bits.x), __uint_as_float(bits.y)}
                : float2{__uint_as_float(bits.z), __uint_as_float(bits.w)};
}

}  // namespace kvlab::kernels
