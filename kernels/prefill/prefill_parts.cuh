// Splits the keys of prompt attention into parts, for calls with so few queries that most of the
// GPU would be idle. A CTA handles kPartKeys of a row's keys, and the results of the parts are
// merged in order. The slots at which parts begin are fixed, so a row's bits depend only on the
// slots that it sees.
//
// Memory traffic: 4 * (head_size + 4) bytes, written and read per row and part.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/prefill/prefill_rows.cuh"

namespace kvlab::kernels {

inline constexpr int kPartKeys = 256;

inline int parts_of(const kvlab_prefill_args& args) {
  return args.workspace == nullptr ? 1 : (args.keys_end + kPartKeys - 1) / kPartKeys;
}
inline std::int64_t rows_of(const kvlab_prefill_args& args) {
  return std::int64_t{queries_of(args)} * args.query_heads;
}

/// The result of one part of the keys for a row. The output [dim], which is not divided by the sum,
/// is stored in a separate array.
struct RowPart {
  float max_product, max, sum, unused;
};

/// Writes the requested results of a row. `max`: the largest product times the scale. `sum`:
/// relative to `max`.
__device__ inline void write_row(const kvlab_prefill_args& args, std::int64_t row,
                                 float max_product, float max, float sum) {
  if (args.lse != nullptr) args.lse[row] = log_sum_exp(max, sum);
  if (args.rows != nullptr) args.rows[row] = {max_product, max + log2f(sum)};
}

struct Plan {
  kvlab_prefill_args args;
  PrefillLayer layer;
  int group;
  float base2_scale;  ///< softmax scale, for base-2 logits
  std::int64_t rows;  ///< queries times query heads

  // The end of the keys of this CTA's part, which is part blockIdx.z.
  template <bool kParts>
  __device__ int keys_end(int all) const {
    return kParts ? min(all, (static_cast<int>(blockIdx.z) + 1) * kPartKeys) : all;
  }
  template <bool kParts>
  __device__ int first_key(int first_seen) const {
    return kParts ? static_cast<int>(blockIdx.z) * kPartKeys : first_seen;
  }
  __device__ float* out(std::int64_t row, int dim) const {
    auto* const outs =
        reinterpret_cast<float*>(static_cast<RowPart*>(args.workspace) + gridDim.z * rows);
    return outs + (blockIdx.z * rows + row) * dim;
  }
  /// Writes the softmax of a row. `max`: the largest product times the scale. `sum`: relative to
  /// `max`.
  template <bool kParts>
  __device__ void write(std::int64_t row, float max_product, float max, float sum) const {
    if constexpr (kParts)
      static_cast<RowPart*>(args.workspace)[blockIdx.z * rows + row] = {max_product, max, sum};
    else
      write_row(args, row, max_product, max, sum);
  }
};

inline constexpr int kMergeWarps = 4;

/// Merges the parts that each row sees. Uses one warp for each row.
template <class T, int kDim>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ Plan plan, int parts) {
  const auto& args = plan.args;
  const OwnQueries own(args);
  const int heads = args.query_heads, lane = static_cast<int>(threadIdx.x) % 32;
  const int index = static_cast<int>(blockIdx.x * kMergeWarps + threadIdx.x / 32);
  if (index >= own.count * heads) return;
  const int pair = own.sequence * args.kv_heads + index % heads / plan.group;
  const int last = (first_query_slot(args, pair) + index / heads) / kPartKeys;
  const std::int64_t row = std::int64_t{own.begin} * heads + index;
  const auto* const states = static_cast<const RowPart*>(args.workspace);
  const auto* const outs = reinterpret_cast<const float*>(states + parts * plan.rows);
  RowPart all = states[row];
  for (int part = 1; part <= last; ++part) {
    const RowPart& next = states[part * plan.rows + row];
    all.max = fmaxf(all.max, next.max);
    all.max_product = fmaxf(all.max_product, next.max_product);
  }
  float out[kDim / 32] = {};
  all.sum = 0;
  for (int part = 0; part <= last; ++part) {
    const RowPart& next = states[part * plan.rows + row];
    const float factor = rescale(next.max, all.max);
    all.sum = fmaf(next.sum, factor, all.sum);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
      out[i] = fmaf(outs[(part * plan.rows + row) * kDim + i * 32 + lane], factor, out[i]);
  }
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i)
    static_cast<T*>(args.out)[row * kDim + i * 32 + lane] = from_float<T>(out[i] / all.sum);
  if (lane == 0) write_row(args, row, all.max_product, all.max, all.sum);
}

/// Merges the parts, if there are any, after the CTAs of the attention. If the launch of the
/// attention failed, returns its error.
template <class T, int kDim>
cudaError_t merge_parts(const Plan& plan, cudaStream_t stream) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || plan.args.workspace == nullptr) return error;
  const int rows = plan.args.queries * plan.args.query_heads;
  const dim3 grid(static_cast<unsigned>((rows + kMergeWarps - 1) / kMergeWarps),
                  static_cast<unsigned>(sequences_of(plan.args)));
  merge_kernel<T, kDim><<<grid, kMergeWarps * 32, 0, stream>>>(plan, parts_of(plan.args));
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
