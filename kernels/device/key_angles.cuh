// Angles of RoPE for the rotations in attention kernels: of a key by its distance to the query, and
// of a query from its original position back to its cache position.
//
// An angle is a fraction of a full circle in fixed point. The product of a position and a 64-bit
// frequency, modulo one circle, is therefore exact at any position.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// The angle for a distance of one position, in units of 2^-64 circles: the high word and the low
/// word.
using Frequency = uint2;

__device__ inline Frequency frequency_of(float inv_freq) {
  constexpr double kTwoPi = 6.283185307179586476925, kTwo64 = 18446744073709551616.0;
  const double circles = inv_freq / kTwoPi;
  const auto fixed = static_cast<std::uint64_t>((circles - floor(circles)) * kTwo64);
  return make_uint2(static_cast<std::uint32_t>(fixed >> 32), static_cast<std::uint32_t>(fixed));
}

/// The angle for a distance of `positions` positions, in units of 2^-32 circles.
__device__ inline std::uint32_t angle_of(Frequency frequency, std::uint32_t positions) {
  return frequency.x * positions + __umulhi(frequency.y, positions);
}

/// Cosine and sine of a rotation back by `positions` positions, exact to the last bits of a float.
/// It is slow.
__device__ inline float2 rotation_back(Frequency frequency, std::uint32_t positions) {
  const auto angle = static_cast<float>(static_cast<std::int32_t>(angle_of(frequency, positions)));
  float2 at;
  sincospif(angle * 0x1p-31f, &at.y, &at.x);
  return make_float2(at.x, -at.y);
}

/// The angles of the keys of one pair (one KV head of one sequence).
struct KeyAngles {
  const Frequency* frequencies;  // [head_size / 2], in shared memory
  std::uint32_t youngest;        ///< age of the newest token: live tokens minus one
  std::uint32_t gone;  ///< age of the token that was evicted since the ages were written; all bits
                       ///< are 1 if there is none
  int newest;          ///< the newest token's slot, relative to `ages`

  /// Distance from the token at `slot` to the query, in positions.
  __device__ std::uint32_t distance(const std::uint32_t* ages, int slot) const {
    const std::uint32_t age = ages[slot];
    return slot == newest ? 0 : youngest - (age - (age > gone ? 1 : 0));
  }
  /// Cosine and sine of a key's angle relative to the query. The angle is negative, because the key
  /// is at an earlier position. Accurate to 2^-20.
  __device__ float2 cos_sin(int i, std::uint32_t positions) const {
    // Converts the upper 23 bits of the angle to a float from -1/2 to 1/2 (circles).
    const std::uint32_t angle = angle_of(frequencies[i], positions);
    const float circles = __uint_as_float(angle >> 9 ^ 0x3fc00000u) - 1.5f;
    constexpr float kTwoPi = 6.28318530717958647692f;
    return make_float2(__cosf(circles * kTwoPi), -__sinf(circles * kTwoPi));
  }
  /// Like cos_sin(), but exact to the last bits of a float, and slow.
  __device__ float2 cos_sin_precise(int i, std::uint32_t positions) const {
    return rotation_back(frequencies[i], positions);
  }
};

/// Rotates four elements of one key in float32: `low` has dimensions i and i + 1, and `high` has
/// dimensions i + head_size / 2 and i + 1 + head_size / 2. `first` and `second` are the cosine and
/// sine for dimension i and for dimension i + 1. The rounding errors of the results are written to
/// `low_rest` and `high_rest`.
template <class T>
__device__ inline void rotate(float2 first, float2 second, std::uint32_t& low, std::uint32_t& high,
                              std::uint32_t& low_rest, std::uint32_t& high_rest) {
  const float2 a = unpack<T>(low), b = unpack<T>(high);
  const float2 x =
      make_float2(fmaf(a.x, first.x, -b.x * first.y), fmaf(a.y, second.x, -b.y * second.y));
  const float2 y =
      make_float2(fmaf(b.x, first.x, a.x * first.y), fmaf(b.y, second.x, a.y * second.y));
  low = pack<T>(x.x, x.y);
  high = pack<T>(y.x, y.y);
  const float2 low_kept = unpack<T>(low), high_kept = unpack<T>(high);
  low_rest = pack<T>(x.x - low_kept.x, x.y - low_kept.y);
  high_rest = pack<T>(y.x - high_kept.x, y.y - high_kept.y);
}

}  // namespace kvlab::kernels
