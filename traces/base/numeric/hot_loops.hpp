// The loops that take the time, compiled once for each instruction set and chosen at run time.
//
// All of them give the same bits on any machine: no FMA contraction (a build flag), every sum in a
// stated order, and where sums are fused they are so everywhere (in software where a machine has no
// such instruction). A result depends neither on how many rows are computed together nor on the
// number of threads. That is why a replay, the end-to-end evaluation by layers and the
// token-by-token decoder reach equal bits, which no BLAS promises for one row and for many.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

inline constexpr std::size_t kLanes = 16;  ///< rows of a panel, and running sums of a lane sum

struct HotLoops {
  const char* name;  ///< of the instruction set

  /// See multiply; w holds `panels` panels.
  void (*multiply_float)(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                         std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  /// See multiply_fused.
  void (*multiply_fused)(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                         std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  void (*multiply_bf16)(const float* x, std::size_t m, std::size_t x_stride, const std::uint16_t* w,
                        std::size_t depth, std::size_t panels, float* y, std::size_t y_stride);
  /// See accumulate_rows; `rows` null: 0, 1, 2, …
  void (*accumulate)(const float* p, const std::uint32_t* rows, std::size_t count, const float* v,
                     std::size_t stride, std::size_t depth, float* y);

  /// e[i] = exp(s[i]) * 2^-shift, about 1 ulp, for |s[i]| < 2^13; below 2^-126 it becomes 0.
  void (*exponentials)(const float* s, std::size_t count, std::int32_t shift, float* e);
  float (*largest)(const float* s, std::size_t count);
  /// Sixteen running sums, index modulo 16, added by halves.
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

/// The loops of the best instruction set that this machine has.
const HotLoops& hot_loops();

const HotLoops& hot_loops_base();
/// Null where the machine (or the build) has no such instructions.
const HotLoops* hot_loops_avx2();
const HotLoops* hot_loops_avx512();

}  // namespace kvlab
