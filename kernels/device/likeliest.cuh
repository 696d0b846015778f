// The most probable id of a row: the one with the largest logit, and the lowest id among equal
// logits.
#pragma once

#include <cstdint>

namespace kvlab::kernels {

/// Converts a logit to an integer with the same order. NaN comes above all numbers, and 0 and -0
/// are equal.
__device__ inline std::uint32_t order_key(float logit) {
  if (isnan(logit)) return 0xffffffffu;
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_order_key(std::uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// An integer that is larger for a more probable id and, among equal logits, for the lower id.
__device__ inline unsigned long long candidate(float logit, int id) {
  return static_cast<unsigned long long>(order_key(logit)) << 32 | ~static_cast<std::uint32_t>(id);
}
__device__ inline float logit_of(unsigned long long best) {
  return from_order_key(static_cast<std::uint32_t>(best >> 32));
}
__device__ inline std::int32_t id_of(unsigned long long best) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(best));
}

}  // namespace kvlab::kernels
