// Copies of tokens as ladders keep them: what is read of their codes, and rows of their keys.
#include "kernels/codes/code.cuh"
#include "kernels/device/load.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/replay/copies.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// A warp for each token (x), of a copy (y) and unit (z).
template <class T>
__global__ void __launch_bounds__(kThreads)
    codes_kernel(const __grid_constant__ ReplayCodesArgs args, T* to) {
  const ReplayCopies& copies = args.copies;
  const int token =
                static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize,
            copy = static_cast<int>(blockIdx.y), unit = static_cast<int>(blockIdx.z),
            config = args.config_units ? unit / args.config_units : 0,
            blocks = args.shape.head_size / kWarpSize;
  const ReplayWay& way = args.ways[config * copies.count + copy];
  if (token >= args.shape.tokens || way.forms == 0) return;
  const std::int64_t first = args.shape.vector(unit, token) + code_lane();
  CodedRow row;
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b)
    if (b < blocks) row.y[b] = load1(args.exact, args.type, first + b * kWarpSize);
  butterflies(row, blocks);
  for (int f = 0; f < way.forms; ++f)
    code_row(row, way.form[f].bits(args.keys), way.form[f].floating, blocks);
  butterflies(row, blocks);
  to += copies.first_part(copy + 1, args.type) + first;
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b) {
    if (b >= blocks) break;
    float left = row.y[b] / kCodeBlock;
    for (int part = 0; part < replay_parts(args.type); ++part) {
      const T kept = from_float<T>(left);
      to[part * copies.vectors + b * kWarpSize] = kept;
      left -= to_float(kept);
    }
  }
}

/// A thread block for each query (x), quad (y) and unit (z).
__global__ void __launch_bounds__(kThreads)
    coded_rows_kernel(const __grid_constant__ ReplayRowsArgs args, float4* rows) {
  const ReplayShape& shape = args.shape;
  const int i = static_cast<int>(blockIdx.x), quad = static_cast<int>(blockIdx.y),
            length = args.rows.first + i + 1, heads = shape.group - 4 * quad;
  const std::int64_t of_query = args.rows.row(blockIdx.z, i),
                     of_quad = of_query * shape.quads() + quad;
  const float* const products = args.products + (of_query * shape.group + 4 * quad) * shape.tokens;
  const float4 most = args.exact_most[of_quad];
  float4* const e = rows + of_quad * shape.tokens;
  const auto of_head = [&](int head, int t, float largest) {
    return head < heads
               ? expf(products[std::int64_t{head} * shape.tokens + t] * shape.softmax_scale -
                      largest)
               : 0.0f;
  };
  for (int t = static_cast<int>(threadIdx.x); t < length; t += kThreads)
    e[t] = {of_head(0, t, most.x), of_head(1, t, most.y), of_head(2, t, most.z),
            of_head(3, t, most.w)};
}

}  // namespace

cudaError_t replay_codes(const ReplayCodesArgs& args, cudaStream_t stream) {
  const ReplayShape& shape = args.shape;
  if (args.copies.count < 1 || args.copies.count > kMostReplayCopies || !shape.is_launchable() ||
      shape.head_size % kWarpSize != 0 || shape.head_size > kMostBlocks * kWarpSize)
    return cudaErrorInvalidValue;
  const dim3 grid = grid_of((shape.tokens + kWarps - 1) / kWarps, args.copies.count, shape.units);
  return with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    codes_kernel<<<grid, kThreads, 0, stream>>>(
        args, static_cast<T*>(args.keys ? args.copies.keys : args.copies.values));
    return cudaGetLastError();
  });
}

cudaError_t replay_coded_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
                              cudaStream_t stream) {
  if (!args.rows.is_launchable() || !args.shape.is_launchable() || copy < 1 || copy > copies.count)
    return cudaErrorInvalidValue;
  const dim3 grid = grid_of(args.rows.count, args.shape.quads(), args.shape.units);
  coded_rows_kernel<<<grid, kThreads, 0, stream>>>(args, args.rows.e + copy * copies.rows);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
