// Splits the keys of prompt attention into parts, for calls with so few queries that most of the
// GPU would be idle. A part is kPartKeys consecutive slots. A CTA handles one part of the keys of
// its rows, and a second kernel merges the parts of each row in the order of the slots. Parts begin
// at multiples of kPartKeys, so the bits of a row's result depend only on the slots that the row
// sees.
//
// Memory traffic: for each row and part, 4 * (head_size + 4) bytes are written and later read.
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

/// The softmax state of a row after one part of the keys. The part's output [dim], not yet divided
/// by `sum`, is in a separate array.
struct RowPart {
  float max_product, max, sum, unused;
};

/// Writes those softmax results of a row that the caller asked for. `max`: the row's reference
/// logit, in base 2. `sum`: the sum of 2^(logit - max).
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
  /// Writes the softmax state of a row: to the workspace if the keys are split into parts,
  /// otherwise with write_row().
  template <bool kParts>
  __device__ void write(std::int64_t row, float max_product, float max, float sum) const {
    if constexpr (kParts)
      static_cast<RowPart*>(args.workspace)[blockIdx.z * rows + row] = {max_product, max, sum};
    else
      write_row(args, row, max_product, max, sum);
  }
};

inline constexpr int kMergeWarps = 4;

/// Merges the parts of the keys that each row sees. One warp handles one row, and each lane every
/// 32nd channel of the row's output.
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

/// Launches the kernel that merges the parts, if the keys are split. If the preceding launch of the
/// attention failed, returns that error.
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
