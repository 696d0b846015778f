// Counts of a cache over a block of queries, from which metrics are computed.
#pragma once

#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// The index of the block of measured queries in whose sum a measured query is included.
__device__ inline int block_of_query(const ReplayMeasured& measured, int index) {
  return static_cast<int>(std::int64_t{index} * measured.blocks / measured.size);
}

/// The sum of a metric for a cache and query head. `Args` is ReplayWalkArgs or ReplayMetricsArgs.
template <class Args>
__device__ double& metric_sum(const Args& args, std::int64_t cache, Sum sum, int head, int block) {
  const SumsShape shape{static_cast<std::size_t>(args.shape.head_groups()),
                        static_cast<std::size_t>(args.measured.named_count)};
  return args.sums[static_cast<std::size_t>(cache) * shape.size() +
                   shape.at(sum, static_cast<std::size_t>(head), static_cast<std::size_t>(block))];
}

/// For query i of the block and each passage before the query, adds two probabilities of the full
/// row to the metrics: that of the passage's kept tokens, and that of all its tokens. Each warp
/// handles one passage at a time. `live`: bits of the live positions. Called by the whole thread
/// block. Not inlined, to save its caller's registers.
template <int kHeadGroups>
__device__ __noinline__ void add_named_sums(const ReplayWalkArgs& args, int task,
                                            std::int64_t cache, const std::uint32_t* live, int i) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int query = args.rows.first + i,
            block = block_of_query(args.measured, args.measured.index[query]);
  for (int s = static_cast<int>(threadIdx.x) / kWarpSize; s < args.measured.named_count;
       s += warps) {
    const int2 named = args.measured.named[s];
    if (named.y > query) continue;
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      const std::int64_t row = args.rows.row(task, i) * kHeadGroups + head_group;
      const float4* const e = args.rows.e + row * args.shape.tokens;
      float4 kept{}, all{};
      for (int token = named.x + lane; token < named.y; token += kWarpSize) {
        const float4 x = e[token];
        add(all, x);
        if (live[token / 32] >> token % 32 & 1) add(kept, x);
      }
      const float kept_sum = warp_fold4(kept, Add{}), all_sum = warp_fold4(all, Add{});
      const int head = 4 * head_group + lane;
      if (lane < 4 && head < args.shape.group) {
        const double sum = component(args.rows.sums[row], lane);
        metric_sum(args, cache, kept_of(s), head, block) += kept_sum / sum;
        metric_sum(args, cache, all_of(s), head, block) += all_sum / sum;
      }
    }
  }
  __syncthreads();
}

/// Stores the sums, hits and live tokens of the cache at each query of the block in args.counts.
/// Called by the whole thread block.
__device__ inline void store_counts(const CacheThread& at, const ReplayShared& shared) {
  const ReplayWalkArgs& args = at.args;
  const ReplayRows& rows = args.rows;
  const std::uint32_t group = args.shape.group, head_groups = args.shape.head_groups();
  for (std::uint32_t n = at.thread; n < rows.count * group; n += at.threads) {
    const std::uint32_t i = n / group, head = n % group;
    const int query = rows.first + static_cast<int>(i);
    if (args.measured.index[query] < 0) continue;
    const std::int64_t row = at.row(static_cast<int>(i)) * head_groups,
                       to = (at.cache() * rows.block + i) * 4 * head_groups + head;
    // The query's own token is always kept, so it is not counted.
    const float request_threshold =
        reinterpret_cast<const float*>(rows.request_threshold + row)[head];
    const float4 own = rows.e[(row + head / 4) * args.shape.tokens + query];
    if (head == 0) args.counts.live[at.cache() * rows.block + i] = shared.visible[i];
    args.counts.kept[to] = shared.kept[i][head];
    args.counts.hits[to] =
        request_threshold <= 0
            ? shared.visible[i] - 1
            : shared.hits[i][head] - (component(own, head % 4) >= request_threshold ? 1 : 0);
  }
}

}  // namespace kvlab::kernels
