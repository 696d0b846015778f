// What a cache counts over a block of queries, for its figures.
#pragma once

#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// Which block of the span a query is summed in.
__device__ inline int span_block(const ReplaySpan& span, int index) {
  return static_cast<int>(std::int64_t{index} * span.blocks / span.size);
}

/// Where a figure of a cache and query head is summed, of ReplayWalkArgs or ReplayFiguresArgs.
template <class Args>
__device__ double& figure_sum(const Args& args, std::int64_t cache, Sum sum, int head, int block) {
  const SumsShape shape{static_cast<std::size_t>(args.shape.quads()),
                        static_cast<std::size_t>(args.span.named_count)};
  return args.sums[static_cast<std::size_t>(cache) * shape.size() +
                   shape.at(sum, static_cast<std::size_t>(head), static_cast<std::size_t>(block))];
}

/// What query i of the block keeps of the probability of each named span before it, and all of it:
/// a warp for each span. `live`: bits of the live positions. By the whole thread block, apart from
/// its caller.
template <int kQuads>
__device__ __noinline__ void add_named_sums(const ReplayWalkArgs& args, int unit,
                                            std::int64_t cache, const std::uint32_t* live, int i) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int query = args.rows.first + i, block = span_block(args.span, args.span.index[query]);
  for (int s = static_cast<int>(threadIdx.x) / kWarpSize; s < args.span.named_count; s += warps) {
    const int2 named = args.span.named[s];
    if (named.y > query) continue;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const std::int64_t row = args.rows.row(unit, i) * kQuads + quad;
      const float4* const e = args.rows.e + row * args.shape.tokens;
      float4 kept{}, all{};
      for (int token = named.x + lane; token < named.y; token += kWarpSize) {
        const float4 x = e[token];
        add(all, x);
        if (live[token / 32] >> token % 32 & 1) add(kept, x);
      }
      const float of_kept = warp_fold4(kept, Add{}), of_all = warp_fold4(all, Add{});
      const int head = 4 * quad + lane;
      if (lane < 4 && head < args.shape.group) {
        const double sum = component(args.rows.sums[row], lane);
        figure_sum(args, cache, kept_of(s), head, block) += of_kept / sum;
        figure_sum(args, cache, all_of(s), head, block) += of_all / sum;
      }
    }
  }
  __syncthreads();
}

/// What the block's queries have kept, to args.counts. By the whole thread block.
__device__ inline void leave_counts(const CacheThread& at, const ReplayShared& shared) {
  const ReplayWalkArgs& args = at.args;
  const ReplayRows& rows = args.rows;
  const std::uint32_t group = args.shape.group, quads = args.shape.quads();
  for (std::uint32_t n = at.thread; n < rows.count * group; n += at.threads) {
    const std::uint32_t i = n / group, head = n % group;
    const int query = rows.first + static_cast<int>(i);
    if (args.span.index[query] < 0) continue;
    const std::int64_t row = at.row(static_cast<int>(i)) * quads,
                       to = (at.cache() * rows.block + i) * 4 * quads + head;
    // The query's own token is kept, and does not count.
    const float least = reinterpret_cast<const float*>(rows.least + row)[head];
    const float4 own = rows.e[(row + head / 4) * args.shape.tokens + query];
    args.counts.kept[to] = shared.kept[i][head];
    args.counts.hits[to] = least <= 0
                               ? shared.visible[i] - 1
                               : shared.hits[i][head] - (component(own, head % 4) >= least ? 1 : 0);
  }
}

}  // namespace kvlab::kernels
