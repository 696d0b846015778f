// Neighbouring elements of a type known when running, as float32.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Elements `at` and at + 1; `at` even.
__device__ inline float2 load2(const void* data, Type type, std::int64_t at) {
  if (type == Type::f32)
    return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + at);
  const auto bits =
      *reinterpret_cast<const std::uint32_t*>(static_cast<const char*>(data) + 2 * at);
  if (type == Type::bf16) return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

/// Elements `at` to at + 3; `at` a multiple of 4.
__device__ inline float4 load4(const void* data, Type type, std::int64_t at) {
  if (type == Type::f32)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
  const auto bits = *reinterpret_cast<const uint2*>(static_cast<const char*>(data) + 2 * at);
  if (type == Type::bf16)
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
            __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x)),
               high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

}  // namespace kvlab::kernels
