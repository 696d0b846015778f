// Common code of the kernels of `linear` and `gated_linear`: their arguments, the norm and the
// epilogue.
#pragma once

#include "kernels/device/activation.cuh"
#include "kernels/device/barrier.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/device/vector.cuh"
#include "kernels/linear/linear.hpp"

namespace kvlab::kernels {

template <class T>
struct LinearProduct {
  int first_row;  // index of this launch's first row among the product's rows
  int rows, n, k;
  const T* weight;  // [n, k]; if gated: the gate
  const T* up;      // [n, k], or null
  const void* x;    // [rows, k] of T, or of float if there is a gamma
  const T* gamma;   // [k], or null
  float norm_epsilon, norm_offset;
  Activation activation;  ///< for the gate
  const T* bias;          // [n], or null
  T* y;                   // of y and the next two members, exactly one is not null
  float* y_float;
  float* residual;
};

inline constexpr int kLinearWarps = 8;
inline constexpr int kLinearThreads = kLinearWarps * kWarpSize;

/// Bytes of a row of normed x in shared memory: k floats, and 16 bytes of padding that put the rows
/// in different banks.
__host__ __device__ constexpr std::size_t normed_row_bytes(int k) {
  return static_cast<std::size_t>(k) * sizeof(float) + 16;
}
template <class T>
__host__ __device__ constexpr std::size_t gamma_bytes(int k) {
  return static_cast<std::size_t>(k) * sizeof(T);
}
/// The residual to which an output is added, or 0.
template <class T>
__device__ inline float residual_of(const LinearProduct<T>& product, int row, int column) {
  return product.residual ? product.residual[static_cast<std::size_t>(row) * product.n + column]
                          : 0.0f;
}
/// Writes one output, with bias, to the destination that is set. Returns the output rounded to T,
/// whichever destination is set.
template <class T>
__device__ inline T write_output(const LinearProduct<T>& product, int row, int column, float value,
                                 float residual) {
  const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(product.n) +
                         static_cast<std::size_t>(column);
  if (product.bias) value += to_float(product.bias[column]);
  const T rounded = from_float<T>(value);
  if (product.y) product.y[at] = rounded;
  if (product.y_float) product.y_float[at] = value;
  if (product.residual) product.residual[at] = residual + value;
  return rounded;
}

/// The part of the norm that a warp computes. A row consists of chunks of eight elements. Chunk c
/// belongs to slice (c / 32) % 8 and to lane c % 32, for any number of rows. So the order in which
/// squares are summed does not depend on the number of rows. A warp handles `count` slices of one
/// row.
struct NormShare {
  int row, first, stride, shift, count;
  __device__ explicit NormShare(int rows) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    shift = rows <= 1 ? 0 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3;
    count = 1 << shift;
    row = warp % count;
    first = warp / count;
    stride = kLinearWarps / count;
  }
  __device__ int slice(int i) const { return first + i * stride; }
};

/// Starts loading gamma, which does not depend on the preceding kernel.
template <class T>
__device__ inline void fetch_gamma(const LinearProduct<T>& product, std::byte* to) {
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * kVector<T>; at < product.k;
       at += kLinearThreads * kVector<T>)
    copy_async(shared_address(to + static_cast<std::size_t>(at) * sizeof(T)), product.gamma + at,
               true);
  commit_copies();
}

/// Computes rows x[r] * gamma / rms(x[r]) in unrounded float32, and writes them to shared memory,
/// with normed_row_bytes() for each row. `finish` stores eight elements at a time. Called by the
/// first kLinearThreads threads of the block. Waits until their copies of gamma to `gammas` are
/// complete, and ends with a barrier of these threads.
template <class T, class Finish>
__device__ inline void norm_rows(const LinearProduct<T>& product, const std::byte* gammas,
                                 std::byte* rows, float* sums, Finish finish) {
  constexpr int kSlices = kLinearWarps;
  constexpr int kAtOnce = 8;  // number of chunks that a lane loads at once
  const NormShare share(product.rows);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, chunks = product.k / 8;
  const std::size_t row = static_cast<std::size_t>(share.row);
  const T* const gamma_row = reinterpret_cast<const T*>(gammas);
  const float* const x = static_cast<const float*>(product.x) + row * product.k;
  float* const out = reinterpret_cast<float*>(rows + row * normed_row_bytes(product.k));
  const int count = share.row < product.rows ? share.count : 0;
  const auto each_chunk = [&](int slice, auto&& f) {
#pragma unroll 1
    for (int chunk = slice * kWarpSize + lane; chunk < chunks; chunk += kSlices * kWarpSize)
      f(chunk * 8);
  };

  // The code is short rather than fast, because the instruction cache is cold at launch.
  const int rounds = (chunks + kSlices * kWarpSize - 1) / (kSlices * kWarpSize);
#pragma unroll 1
  for (int first = 0; first < count * rounds; first += kAtOnce) {
    Vector<float> loaded[kAtOnce][2];
    const auto place = [&](int i) {  // the element of x at which the i-th chunk begins; beyond k if
                                     // there is no such chunk
      const int at = first + i, slice = share.slice(at & (share.count - 1));
      return (((at >> share.shift) * kSlices + slice) * kWarpSize + lane) * 8;
    };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (const int at = place(i); at < product.k) {
        loaded[i][0] = *reinterpret_cast<const Vector<float>*>(x + at);
        loaded[i][1] = *reinterpret_cast<const Vector<float>*>(x + at + 4);
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (const int at = place(i); at < product.k) {
        *reinterpret_cast<Vector<float>*>(out + at) = loaded[i][0];
        *reinterpret_cast<Vector<float>*>(out + at + 4) = loaded[i][1];
      }
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float squares = 0;
    each_chunk(share.slice(i), [&](int at) {
      float value[8];
      load_eight(out + at, value);
#pragma unroll
      for (const float v : value) squares = fmaf(v, v, squares);
    });
    squares = warp_sum(squares);
    if (lane == 0) sums[share.row * kSlices + share.slice(i)] = squares;
  }
  wait_copies<0>();
  barrier_of_first<kLinearThreads>();

  float sum = 0;
  for (int slice = 0; count && slice < kSlices; ++slice) sum += sums[share.row * kSlices + slice];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(product.k) + product.norm_epsilon);
#pragma unroll 1
  for (int i = 0; i < count; ++i)
    each_chunk(share.slice(i), [&](int at) {
      float value[8], gamma[8];
      load_eight(out + at, value);
      load_eight(gamma_row + at, gamma);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[e] *= scale * (product.norm_offset + gamma[e]);
      finish(value, out + at);
    });
  barrier_of_first<kLinearThreads>();
}

}  // namespace kvlab::kernels
