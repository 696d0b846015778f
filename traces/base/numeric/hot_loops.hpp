// The loops that dominate run time, compiled for each instruction set and selected at run time.
//
// All versions give the same bits on any machine, because the build disables FMA contraction, every
// sum has a documented order, and fused sums are fused everywhere (in software on machines without
// the instruction). A result depends neither on the number of rows that are computed together nor
// on the number of threads. So a replay, the end-to-end evaluation by layers and the token-by-token
// decoder give equal bits. A BLAS library does not guarantee this, because it may sum one row in
// another order than many rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

inline constexpr std::size_t kLanes = 16;  ///< rows of a panel, and running sums of lane_sum()

struct HotLoops {
  const char* name;  ///< name of the instruction set

  /// See multiply() in panels.hpp; w holds `panels` panels.
  void (*multiply_float)(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                         std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  /// See multiply_fused() in panels.hpp.
  void (*multiply_fused)(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                         std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  void (*multiply_bf16)(const float* x, std::size_t m, std::size_t x_stride, const std::uint16_t* w,
                        std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  /// See accumulate_rows() in panels.hpp; `rows` null: 0, 1, 2, …
  void (*accumulate)(const float* p, const std::uint32_t* rows, std::size_t count, const float* v,
                     std::size_t stride, std::size_t depth, float* y);

  /// e[i] = exp(s[i]) * 2^-shift, accurate to about 1 ulp, for |s[i]| < 2^13; results below 2^-126
  /// become 0.
  void (*exponentials)(const float* s, std::size_t count, std::int32_t shift, float* e);
  float (*largest)(const float* s, std::size_t count);
  /// Adds x[i] to running sum i modulo 16. Then adds the upper half of the sums to the lower half,
  /// until one sum is left.
  float (*lane_sum)(const float* x, std::size_t count);
  double (*lane_sum_of_squares)(const float* x, std::size_t count);

  void (*divide)(const float* x, std::size_t count, float divisor, float* y);
  void (*scale)(float* x, std::size_t count, float factor);
  void (*add)(const float* x, std::size_t count, float* y);
  /// y[i] = x[i] * factor * weight[i].
  void (*scale_by)(const float* x, const float* weight, std::size_t count, float factor, float* y);
  void (*silu_times)(float* gate, const float* up, std::size_t count);
  void (*gelu_times)(float* gate, const float* up, std::size_t count);
};

/// The loops of the best instruction set of this machine.
const HotLoops& hot_loops();

const HotLoops& hot_loops_base();
/// These return null if the machine or the build does not support the instruction set.
const HotLoops* hot_loops_avx2();
const HotLoops* hot_loops_avx512();

}  // namespace kvlab
