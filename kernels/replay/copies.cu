// Makes copies of all tokens in the formats of tier plans: quantizes and dequantizes keys and
// values. Also computes the rows of the quantized keys.
#include "kernels/device/load.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/quantized/quantize.cuh"
#include "kernels/replay/copies.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// Uses one warp for each token (x), copy (y) and head task (z).
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ ReplayQuantizeArgs args, T* to) {
  const ReplayCopies& copies = args.copies;
  const int token =
                static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize,
            copy = static_cast<int>(blockIdx.y), task = static_cast<int>(blockIdx.z),
            config = args.config_tasks ? task / args.config_tasks : 0,
            blocks = args.shape.head_size / kWarpSize;
  const ReplayDemotionPath& path = args.paths[config * copies.count + copy];
  if (token >= args.shape.tokens || path.formats == 0) return;
  const std::int64_t first = args.shape.vector(task, token) + lane_id();
  QuantizedRow row;
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b)
    if (b < blocks) row.y[b] = load1(args.exact, args.type, first + b * kWarpSize);
  hadamard_rotate(row, blocks);
  for (int f = 0; f < path.formats; ++f)
    quantize_row(row, path.format[f].bits(args.keys), path.format[f].floating, blocks);
  hadamard_rotate(row, blocks);
  to += copies.first_part(copy + 1, args.type) + first;
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= blocks) break;
    float left = row.y[b] / kQuantBlock;
    for (int part = 0; part < replay_parts(args.type); ++part) {
      const T kept = from_float<T>(left);
      to[part * copies.vectors + b * kWarpSize] = kept;
      left -= to_float(kept);
    }
  }
}

/// Uses one thread block for each query (x), head group (y) and head task (z).
__global__ void __launch_bounds__(kThreads)
    quantized_rows_kernel(const __grid_constant__ ReplayRowsArgs args, float4* rows) {
  const ReplayShape& shape = args.shape;
  const int i = static_cast<int>(blockIdx.x), head_group = static_cast<int>(blockIdx.y),
            length = args.rows.first + i + 1, heads = shape.group - 4 * head_group;
  const std::int64_t query_row = args.rows.row(blockIdx.z, i),
                     head_group_row = query_row * shape.head_groups() + head_group;
  const float* const products =
      args.products + (query_row * shape.group + 4 * head_group) * shape.tokens;
  const float4 max_logit = args.exact_max[head_group_row];
  float4* const e = rows + head_group_row * shape.tokens;
  const auto exponential = [&](int head, int t, float largest) {
    return head < heads
               ? expf(products[std::int64_t{head} * shape.tokens + t] * shape.softmax_scale -
                      largest)
               : 0.0f;
  };
  for (int t = static_cast<int>(threadIdx.x); t < length; t += kThreads)
    e[t] = {exponential(0, t, max_logit.x), exponential(1, t, max_logit.y),
            exponential(2, t, max_logit.z), exponential(3, t, max_logit.w)};
}

}  // namespace

cudaError_t replay_quantize(const ReplayQuantizeArgs& args, cudaStream_t stream) {
  const ReplayShape& shape = args.shape;
  if (args.copies.count < 1 || args.copies.count > kMaxReplayCopies || !shape.is_launchable() ||
      shape.head_size % kWarpSize != 0 || shape.head_size > kMaxBlocks * kWarpSize)
    return cudaErrorInvalidValue;
  const dim3 grid = grid_of((shape.tokens + kWarps - 1) / kWarps, args.copies.count, shape.tasks);
  return with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    quantize_kernel<<<grid, kThreads, 0, stream>>>(
        args, static_cast<T*>(args.keys ? args.copies.keys : args.copies.values));
    return cudaGetLastError();
  });
}

cudaError_t replay_quantized_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
                                  cudaStream_t stream) {
  if (!args.rows.is_launchable() || !args.shape.is_launchable() || copy < 1 || copy > copies.count)
    return cudaErrorInvalidValue;
  const dim3 grid = grid_of(args.rows.count, args.shape.head_groups(), args.shape.tasks);
  quantized_rows_kernel<<<grid, kThreads, 0, stream>>>(args, args.rows.e + copy * copies.rows);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
