// Products with float32 weights. They are used in checks and are not optimized for speed. Still, a
// launch reads each weight only once, in loads of 16 bytes per lane.
#include "kernels/linear/linear_f32.cuh"

#include <algorithm>

#include "kernels/device/grid_dependency.cuh"
#include "kernels/launch.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kSumsBytes = kMaxLinearRows * kLinearWarps * sizeof(float);

/// The products of one weight row with all rows of x, returned in every lane. `stride`: number of
/// floats from one row of x to the next.
__device__ void multiply_row(const float* weights, const float* x, std::size_t stride, int rows,
                             int k, float (&sums)[kMaxLinearRows]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (float& sum : sums) sum = 0;
  for (int at = lane * 4; at < k; at += kWarpSize * 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + at);
#pragma unroll
    for (int row = 0; row < kMaxLinearRows; ++row) {
      if (row >= rows) break;
      const float4 v = *reinterpret_cast<const float4*>(x + row * stride + at);
      sums[row] = fmaf(w.x, v.x, fmaf(w.y, v.y, fmaf(w.z, v.z, fmaf(w.w, v.w, sums[row]))));
    }
  }
#pragma unroll
  for (float& sum : sums) sum = warp_sum(sum);
}

struct StoreEight {
  __device__ void operator()(const float (&value)[8], float* to) const { store_eight(value, to); }
};

/// Uses one warp for each output.
__global__ void __launch_bounds__(kLinearThreads)
    linear_f32_kernel(const LinearProduct<float> product) {
  extern __shared__ __align__(16) std::byte shared[];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (product.gamma) fetch_gamma(product, shared + kSumsBytes);
  let_successor_start();
  wait_for_predecessor();
  const float* x = static_cast<const float*>(product.x);
  std::size_t stride = static_cast<std::size_t>(product.k);
  if (product.gamma) {
    std::byte* const rows = shared + kSumsBytes + gamma_bytes<float>(product.k);
    norm_rows(product, shared + kSumsBytes, rows, reinterpret_cast<float*>(shared), StoreEight{});
    x = reinterpret_cast<const float*>(rows);
    stride = normed_row_bytes(product.k) / sizeof(float);
  }
  for (int n = static_cast<int>(blockIdx.x) * kLinearWarps + warp; n < product.n;
       n += static_cast<int>(gridDim.x) * kLinearWarps) {
    const std::size_t row_start = static_cast<std::size_t>(n) * product.k;
    float sums[kMaxLinearRows], ups[kMaxLinearRows];
    multiply_row(product.weight + row_start, x, stride, product.rows, product.k, sums);
    if (product.up) multiply_row(product.up + row_start, x, stride, product.rows, product.k, ups);
#pragma unroll
    for (int row = 0; row < kMaxLinearRows; ++row)
      if (row < product.rows && lane == row)
        write_output(product, row, n,
                     product.up ? activate(product.activation, sums[row]) * ups[row] : sums[row],
                     residual_of(product, row, n));
  }
}

}  // namespace

/// Plans a launch for as many rows as fit in shared memory. With a norm, shared memory holds gamma
/// and the normed rows.
LaunchPlan plan_linear_f32(bool normed, int rows, int n, int k, const DeviceLimits& limits) {
  const auto bytes_for = [&](int count) {
    return kSumsBytes +
           (normed ? gamma_bytes<float>(k) + static_cast<std::size_t>(count) * normed_row_bytes(k)
                   : 0);
  };
  int each = rows;
  while (each > 0 && bytes_for(each) > static_cast<std::size_t>(limits.shared_bytes)) --each;
  const int blocks = std::min((n + kLinearWarps - 1) / kLinearWarps, 4 * limits.multiprocessors);
  return {
      .blocks = each == 0 ? 0 : blocks, .rows = each, .shared_bytes = bytes_for(std::max(each, 1))};
}

cudaError_t launch_linear_f32(const LinearProduct<float>& product, cudaStream_t stream) {
  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  const LaunchPlan plan =
      plan_linear_f32(product.gamma != nullptr, product.rows, product.n, product.k, limits);
  if (!plan.fits()) return cudaErrorNotSupported;  // why_not_linear() returns the reason
  const int each = plan.rows;
  error = allow_shared_memory(linear_f32_kernel, limits);
  const Launch where{.grid = dim3(static_cast<unsigned>(plan.blocks)),
                     .block = dim3(kLinearThreads),
                     .shared_bytes = plan.shared_bytes,
                     .stream = stream};
  for (int done = 0; done < product.rows && error == cudaSuccess; done += each) {
    LinearProduct<float> part = product;
    const std::size_t n = static_cast<std::size_t>(done) * static_cast<std::size_t>(product.n);
    part.rows = std::min(each, product.rows - done);
    part.x = static_cast<const float*>(product.x) + static_cast<std::size_t>(done) * product.k;
    if (product.y) part.y = product.y + n;
    if (product.y_float) part.y_float = product.y_float + n;
    if (product.residual) part.residual = product.residual + n;
    error = launch(limits, linear_f32_kernel, where, part);
  }
  return error;
}

}  // namespace kvlab::kernels
