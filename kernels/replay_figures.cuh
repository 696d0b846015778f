// A cache's figures over a block of queries: sums, and what it leaves for its outputs.
#pragma once

#include "kernels/device/load.cuh"
#include "kernels/replay_own.cuh"

namespace kvlab::kernels {

/// Which block of the span a query is summed in.
__device__ inline int span_block(const ReplaySpan& span, int index) {
  return static_cast<int>(std::int64_t{index} * span.blocks / span.size);
}

/// Where a figure of a cache and query head is summed.
__device__ inline double& figure_sum(const ReplayArgs& args, std::int64_t figure, ReplaySum kind,
                                     int head, int block) {
  const int heads = 4 * args.shape.quads();
  return args.figures
      .sums[((figure * kReplaySums + static_cast<int>(kind)) * heads + head) * kReplaySpanBlocks +
            block];
}

/// Recall, its logarithm and misses: kept sums become recalls, then a thread adds up each sum and
/// head. By the whole block.
class RecallSums {
 public:
  __device__ RecallSums(const ReplayPlace& at, ReplayShared& shared)
      : at_(at), shared_(shared), quads_(at.args.shape.quads()) {}

  __device__ void add() {
    const ReplayArgs& args = at_.args;
    const auto group = static_cast<std::uint32_t>(args.shape.group),
               count = static_cast<std::uint32_t>(args.rows.count);
    for (std::uint32_t n = at_.thread; n < count * group; n += at_.threads) {
      const int i = static_cast<int>(n / group), head = static_cast<int>(n % group);
      if (args.span.index[args.rows.first + i] >= 0) resolve(i, head);
    }
    __syncthreads();
    for (std::uint32_t n = at_.thread; n < 4 * group; n += at_.threads)
      add(static_cast<ReplaySum>(n / group), static_cast<int>(n % group));
  }

 private:
  __device__ void resolve(int i, int head) {
    float& kept = shared_.kept[i][head];
    std::uint32_t& hits = shared_.hits[i][head];
    if (kept < 0) {
      kept = 1;
      hits = wanted(i, head);
    } else {
      kept /= of_head(at_.args.rows.sums, i, head);
      // The query's own token is kept, and does not count.
      const std::int64_t tokens = at_.args.shape.tokens;
      const float4* const row =
          at_.args.rows.e + (at_.row(i) * quads_ + head / 4) * tokens + at_.args.rows.first + i;
      const float least = of_head(at_.args.rows.least, i, head);
      if (least <= 0)
        hits = shared_.visible[i] - 1;
      else if (component(*row, head % 4) >= least)
        --hits;
    }
    nll(i, head) = static_cast<float>(-log(fmax(double{kept}, 1e-9)));
  }
  __device__ void add(ReplaySum kind, int head) {
    const ReplayArgs& args = at_.args;
    for (int i = 0; i < args.rows.count; ++i) {
      const int index = args.span.index[args.rows.first + i];
      if (index < 0) continue;
      double value = shared_.kept[i][head];
      if (kind == ReplaySum::nll) value = nll(i, head);
      if (kind == ReplaySum::missed) value = wanted(i, head) - shared_.hits[i][head];
      if (kind == ReplaySum::wanted) value = wanted(i, head);
      figure_sum(args, at_.figure(), kind, head, span_block(args.span, index)) += value;
    }
  }
  __device__ float& nll(int i, int head) {
    return (&shared_.scratch[0][0])[i * kMostReplayGroup + head];
  }
  template <class T>
  __device__ auto of_head(const T* rows, int i, int head) const {
    return reinterpret_cast<const float*>(rows + at_.row(i) * quads_)[head];
  }
  __device__ std::uint32_t wanted(int i, int head) const {
    return reinterpret_cast<const std::uint32_t*>(at_.args.rows.wanted + at_.row(i) * quads_)[head];
  }

  const ReplayPlace& at_;
  ReplayShared& shared_;
  const int quads_;
};

/// Exponentials by values of the slots whose exponentials are the cache's own: of those that hold
/// tokens before `young`. To `to` [group, dim], not divided by the sum. By the whole block.
template <int kQuads>
__device__ void sum_own_values(const ReplayArgs& args, OwnRow row, std::uint32_t young,
                               float (*scratch)[kReplayDims], float* to) {
  const ReplayShape& shape = args.shape;
  const std::uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize,
                      warps = blockDim.x / kWarpSize;
  const std::int64_t values = row.unit * shape.tokens * shape.head_size;
  for (int first = 0; first < shape.head_size; first += kReplayDims) {
    const int d = first + 4 * static_cast<int>(lane);
    float4 sums[4 * kQuads] = {};
    for (std::uint32_t base = warp * kWarpSize; base < row.visible; base += blockDim.x) {
      const std::uint32_t mine = base + lane;
      const std::uint32_t position = mine < row.visible ? row.positions[mine] : ~0u;
      for (std::uint32_t mask = __ballot_sync(~0u, position < young); mask != 0;) {
        float4 value[4], e[4][kQuads];
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // past the last, it counts as nothing
          const bool is = mask != 0;
          const int bit = is ? __ffs(static_cast<int>(mask)) - 1 : 0;
          mask &= mask - 1;
          const std::uint32_t token = __shfl_sync(~0u, position, bit);
          value[n] = is && d < shape.head_size
                         ? load4(args.tensors.values, args.tensors.type,
                                 values + std::int64_t{token} * shape.head_size + d)
                         : float4{};
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad)
            e[n][quad] = is ? row.own[quad * args.caches.unit_slots + base + bit] : float4{};
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int head = 0; head < 4 * kQuads; ++head) {
            const float weight = component(e[n][head / 4], head % 4);
            float4& sum = sums[head];
            sum.x = fmaf(weight, value[n].x, sum.x), sum.y = fmaf(weight, value[n].y, sum.y);
            sum.z = fmaf(weight, value[n].z, sum.z), sum.w = fmaf(weight, value[n].w, sum.w);
          }
      }
    }
    for (std::uint32_t turn = 0; turn < warps; ++turn) {  // in the order of warps
      if (warp == turn)
#pragma unroll
        for (int head = 0; head < 4 * kQuads; ++head) {
          float4& sum = *reinterpret_cast<float4*>(&scratch[head][4 * lane]);
          if (turn == 0) sum = float4{};
          add(sum, sums[head]);
          if (turn == warps - 1 && head < shape.group && d < shape.head_size)
            *reinterpret_cast<float4*>(to + head * shape.head_size + d) = sum;
        }
      __syncthreads();
    }
  }
}

/// The same, apart from its caller: where it is seldom called.
template <int kQuads>
__device__ __noinline__ void sum_own_values_apart(const ReplayArgs& args, OwnRow row,
                                                  std::uint32_t young,
                                                  float (*scratch)[kReplayDims], float* to) {
  sum_own_values<kQuads>(args, row, young, scratch, to);
}

}  // namespace kvlab::kernels
