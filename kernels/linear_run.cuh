// What the kernels behind `linear` and `gated_linear` share: their arguments, the norm, the
// epilogue.
#pragma once

#include "kernels/device/reduce.cuh"
#include "kernels/device/vector.cuh"
#include "kernels/linear.hpp"

namespace kvlab::kernels {

template <class T>
struct LinearRun {
  int rows, n, k;
  const T* weight;  // [n, k]; where gated: the gate
  const T* up;      // [n, k], or null
  const void* x;    // [rows, k] of T, or float where there is a gamma
  const T* gamma;   // [k], or null
  float norm_epsilon;
  const T* bias;  // [n], or null
  T* y;           // one of three is not null
  float* y_float;
  float* residual;
};

inline constexpr int kLinearWarps = 8;
inline constexpr int kLinearThreads = kLinearWarps * kWarpSize;

/// A row of normed x in shared memory: k floats and 16 bytes, which put the rows in different
/// banks.
__host__ __device__ constexpr std::size_t normed_row_bytes(int k) {
  return static_cast<std::size_t>(k) * sizeof(float) + 16;
}

/// Writes bias, product and whatever is asked for one output.
template <class T>
__device__ inline void write_output(const LinearRun<T>& run, int row, int column, float value) {
  const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(run.n) +
                         static_cast<std::size_t>(column);
  if (run.bias) value += to_float(run.bias[column]);
  if (run.y) run.y[at] = from_float<T>(value);
  if (run.y_float) run.y_float[at] = value;
  if (run.residual) run.residual[at] += value;
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

/// The norm's share of a warp. Chunk c of a row, eight elements, belongs to slice (c / 32) % 8 and
/// lane c % 32, whatever the number of rows, so that sums of squares do not depend on it; a warp
/// takes the slices first, first + step, ... of one row.
struct NormShare {
  int row, first, step;
  __device__ explicit NormShare(int rows) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int padded = rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;
    row = warp % padded;
    first = warp / padded;
    step = kLinearWarps / padded;
  }
  __device__ int slice(int i) const { return first + i * step; }
};

/// normed[r] = x[r] * gamma / rms(x[r]), float32 and unrounded, in rows of normed_row_bytes(k).
/// `finish` turns eight floats in place, which the same thread has written. Ends with a barrier.
template <class T, class Finish>
__device__ inline void norm_rows(const LinearRun<T>& run, std::byte* normed, float* sums,
                                 Finish finish) {
  constexpr int kSlices = kLinearWarps, kAtOnce = 4;
  const NormShare share(run.rows);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, chunks = run.k / 8;
  const float* x = static_cast<const float*>(run.x) + static_cast<std::size_t>(share.row) * run.k;
  float* const out = reinterpret_cast<float*>(normed + static_cast<std::size_t>(share.row) *
                                                           normed_row_bytes(run.k));
  const bool active = share.row < run.rows;

  float squares[kSlices] = {};
  for (int base = 0; base < chunks; base += kSlices * kWarpSize) {
#pragma unroll
    for (int half = 0; half < kSlices; half += kAtOnce) {
      float value[kAtOnce][8] = {}, gamma[kAtOnce][8];
      int chunk[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // loads first, all on their way together
        const int slice = share.slice(half + i);
        chunk[i] = base + slice * kWarpSize + lane;
        if (!active || slice >= kSlices || chunk[i] >= chunks) {
          chunk[i] = -1;
          continue;
        }
        load_eight(x + chunk[i] * 8, value[i]);
        load_eight(run.gamma + chunk[i] * 8, gamma[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (chunk[i] < 0) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          squares[half + i] = fmaf(value[i][e], value[i][e], squares[half + i]);
          value[i][e] *= gamma[i][e];
        }
        store_eight(value[i], out + chunk[i] * 8);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSlices; ++i) {
    const float sum = warp_sum(squares[i]);
    if (active && share.slice(i) < kSlices && lane == 0)
      sums[share.row * kSlices + share.slice(i)] = sum;
  }
  __syncthreads();

  float sum = 0;
  for (int slice = 0; active && slice < kSlices; ++slice) sum += sums[share.row * kSlices + slice];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(run.k) + run.norm_epsilon);
  for (int slice = share.first; active && slice < kSlices; slice += share.step)
    for (int chunk = slice * kWarpSize + lane; chunk < chunks; chunk += kSlices * kWarpSize) {
      float value[8];
      load_eight(out + chunk * 8, value);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[e] *= scale;
      finish(value, out + chunk * 8);
    }
  __syncthreads();
}

}  // namespace kvlab::kernels
