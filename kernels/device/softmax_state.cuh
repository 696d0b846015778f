// Softmax over a row in parts: the state of each part, and how two parts are merged.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace kvlab::kernels {

/// Factor from a natural logit to a base-2 logit.
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

/// 2^x, with an error of about 2 ulp. It is 0 for -infinity.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The factor that converts sums relative to the logit `from` to sums relative to `to` >= from. It
/// is 0 for an empty part (from = -infinity), even if `to` is -infinity too.
__device__ inline float rescale(float from, float to) {
  return from == -INFINITY ? 0.0f : exp2_fast(from - to);
}

/// The softmax state of some keys of one row. It is a monoid: the state of no keys is neutral, and
/// `merge` is associative up to rounding. Parts are merged in a fixed order, so that results are
/// equal bit for bit.
template <int kWidth>
struct SoftmaxState {
  float max = -INFINITY;   ///< largest base-2 logit
  float sum = 0;           ///< sum of 2^(logit - max)
  float out[kWidth] = {};  ///< sums of 2^(logit - max) * value, for some dimensions of the value
};

template <int kWidth>
__device__ inline SoftmaxState<kWidth> merge(const SoftmaxState<kWidth>& a,
                                             const SoftmaxState<kWidth>& b) {
  SoftmaxState<kWidth> both;
  both.max = fmaxf(a.max, b.max);
  const float scale_a = rescale(a.max, both.max), scale_b = rescale(b.max, both.max);
  both.sum = fmaf(a.sum, scale_a, b.sum * scale_b);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) both.out[i] = fmaf(a.out[i], scale_a, b.out[i] * scale_b);
  return both;
}

/// The natural logarithm of the sum of e^logit, from a state's `max` and `sum`.
__device__ inline float log_sum_exp(float max, float sum) { return (max + log2f(sum)) * kLn2; }

}  // namespace kvlab::kernels
