// Decode attention for few pairs that have few slots. A cluster of CTAs handles each pair, and
// requests all keys and values of the pair while the preceding kernel still runs. So the kernel
// adds only the time from the arrival of the query to the output. Parts are merged through the
// shared memory of the cluster, which takes half as long as through global memory.
//
// The CTAs of a cluster share a pair's tiles evenly. Each warp computes a part from its tiles. Each
// CTA merges some columns (a column is four dimensions of a query head) over all parts, always in
// the same order.
#pragma once

#include "kernels/decode/pair_plan.cuh"
#include "kernels/decode/pair_tiles.cuh"
#include "kernels/device/cluster.cuh"
#include "kernels/device/even_share.cuh"
#include "kernels/launch.cuh"

namespace kvlab::kernels {

inline constexpr int kColumnThreads = 8;  ///< threads that merge one column together

/// The data that a CTA merges, in shared memory after the Exchange: of every part, the CTA's
/// columns, and the softmax state of each head.
template <int kDim>
struct ClusterParts {
  int group;
  float* memory;

  __device__ static constexpr int columns(int group) { return cluster_columns<kDim>(group); }
  __device__ float4* column(int part, int i) const {
    return reinterpret_cast<float4*>(memory) + part * columns(group) + i;
  }
  __device__ float2* state(int part, int head) const {
    return reinterpret_cast<float2*>(column(kClusterParts, 0)) + part * group + head;
  }

  /// Sends a warp's part to the CTAs of the cluster. Each CTA gets the columns that it merges.
  /// Called by the whole warp.
  __device__ void push(const WarpPart& found, int part) const {
    const int lane = threadIdx.x % 32, each = columns(group);
    for (int i = lane; i < group * kDim / 4; i += 32)
      store_in(i / each, column(part, i % each), reinterpret_cast<const float4*>(found.out)[i]);
    for (int i = lane; i < group * kClusterCtas; i += 32)
      store_in(i / group, state(part, i % group), found.state[i % group]);
  }
};

/// The sum over the threads of a column, returned in each of them.
__device__ inline float column_sum(float value) {
#pragma unroll
  for (int step = 1; step < kColumnThreads; step *= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

/// Merges the columns of CTA `rank` and writes their outputs. Called by all threads.
template <class Warp>
__device__ void merge_columns(const PairPlan& plan, const ClusterParts<Warp::kHeadSize>& parts,
                              int pair, int rank) {
  constexpr int kChunks = Warp::kHeadSize / 4, kOwn = kClusterParts / kColumnThreads;
  const int group = plan.args.group, each = parts.columns(group);
  const int own = threadIdx.x % kColumnThreads;
#pragma unroll 1
  for (int first = 0; first < each; first += kThreads / kColumnThreads) {
    const int i = first + static_cast<int>(threadIdx.x) / kColumnThreads, column = rank * each + i;
    const bool wanted = i < each && column < group * kChunks;
    const int head = wanted ? column / kChunks : 0;
    float2 states[kOwn];
    float4 outs[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int part = own + k * kColumnThreads;
      states[k] = *parts.state(part, head);
      outs[k] = wanted ? *parts.column(part, i) : float4{};
    }
    float max = states[0].x;
#pragma unroll
    for (int k = 1; k < kOwn; ++k) max = fmaxf(max, states[k].x);
#pragma unroll
    for (int step = 1; step < kColumnThreads; step *= 2)
      max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    float sum = 0;
    float4 out{};
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const float weight = rescale(states[k].x, max);
      sum = fmaf(weight, states[k].y, sum);
      out.x = fmaf(weight, outs[k].x, out.x);
      out.y = fmaf(weight, outs[k].y, out.y);
      out.z = fmaf(weight, outs[k].z, out.z);
      out.w = fmaf(weight, outs[k].w, out.w);
    }
    sum = column_sum(sum);
    out = make_float4(column_sum(out.x), column_sum(out.y), column_sum(out.z), column_sum(out.w));
    if (wanted && own == 0)
      write_output<typename Warp::Element>(plan, pair * group + head, column % kChunks * 4, out,
                                           make_float2(max, sum));
  }
}

/// Prefetches the tile of the newest token into the L2 cache. The copy of this tile to shared
/// memory has to wait until the preceding kernel has written the newest token. By then the whole
/// tile is in the L2 cache.
template <class Warp, bool kPaged>
__device__ void prefetch_newest(const PairPlan& plan, const SlotsOfPair& slots, int first,
                                int count) {
  const PairAttention& args = plan.args;
  constexpr int kLine = 128;
  constexpr int kSlot = Warp::kHeadSize * static_cast<int>(sizeof(typename Warp::Element));
  const int tile = slots.newest / kSlotsPerTile;
  if (tile < first || tile >= first + count) return;
  const int slot = tile * kSlotsPerTile;
  if constexpr (kPaged) {
    // One thread prefetches one cache line of a slot.
    constexpr int kLines = (kSlot + kLine - 1) / kLine;
    const int pair = slots.pair, end = min(slots.live, slot + kSlotsPerTile);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); slot + i / kLines < end; i += kThreads) {
      const std::int64_t row = paged_row(plan.paged, pair, args.table.kv_heads, slot + i / kLines) *
                                   static_cast<std::int64_t>(sizeof(typename Warp::Element)) +
                               i % kLines * kLine;
      prefetch_line(static_cast<const char*>(args.keys) + row);
      prefetch_line(static_cast<const char*>(args.values) + row);
    }
    return;
  }
  const int bytes = min(slots.live - slot, kSlotsPerTile) * kSlot;
  const std::int64_t from = (slots.base / Warp::kHeadSize + slot) * kSlot;
#pragma unroll 1  // keeps the code short, because the instruction cache is cold at launch
  for (int at = static_cast<int>(threadIdx.x) * kLine; at < bytes; at += kThreads * kLine) {
    prefetch_line(static_cast<const char*>(args.keys) + from + at);
    prefetch_line(static_cast<const char*>(args.values) + from + at);
  }
}

template <class Warp, bool kPaged>
__global__ void __launch_bounds__(kThreads)
    attend_in_clusters(const __grid_constant__ PairPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // compiled only for devices that can launch it
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kDim = Warp::kHeadSize;
  const PairAttention& args = plan.args;
  const Ring<Warp> ring{plan.stages, memory};
  const Exchange<kDim> exchange{args.group,
                                reinterpret_cast<float*>(memory + Ring<Warp>::bytes(plan.stages))};
  const ClusterParts<kDim> parts{args.group, exchange.memory + exchange.parts_floats()};
  cluster_arrive();
  if (!args.settled) wait_for_predecessor();
  const int rank = cluster_rank(), warp = static_cast<int>(threadIdx.x) / 32;
  const SlotsOfPair slots(args.table, kDim, static_cast<int>(blockIdx.x) / kClusterCtas);
  __syncthreads();  // all threads have read the length; later kernels of the stream may change it
  let_successor_start();
  const EvenShare share(slots.tiles(), kClusterCtas);
  const int first = share.begin(rank), count = share.begin(rank + 1) - first;
  prefetch_newest<Warp, kPaged>(plan, slots, first, count);
  AllTilesAhead<Warp, kPaged> tiles(plan, ring.tiles(warp), TileCursor{slots, first}, count);
  wait_for_predecessor();
  Warp state;
  state.start(static_cast<const typename Warp::Element*>(args.q) +
                  std::int64_t{slots.pair} * args.group * kDim,
              args.group);
  if (args.sinks != nullptr && rank == 0 &&
      warp == 0)  // only one warp adds the sink logits. The warp's maximum may then be a sink
                  // logit, but no observer reads it in this kernel
    state.count_sinks(args.sinks + slots.pair % args.table.kv_heads * args.group);
  TileUse use{};
  for (int i = 0; i < count; ++i) {
    const auto& tile = tiles.next();
    use.valid = slots.live - (first + i) * kSlotsPerTile - warp * Warp::kKeys;
    if (use.valid > 0) state.add(tile, use, plan.base2_scale);
  }
  state.finish(exchange.part(warp));
  __syncwarp();
  cluster_wait();  // all CTAs have started
  parts.push(exchange.part(warp), rank * kWarps + warp);
  cluster_arrive();
  cluster_wait();
  if (slots.live > 0) merge_columns<Warp>(plan, parts, slots.pair, rank);
#endif
}

template <class Warp, bool kPaged>
cudaError_t launch_clusters(const DeviceLimits& limits, const PairPlan& plan, const LaunchPlan& how,
                            cudaStream_t stream) {
  const auto kernel = attend_in_clusters<Warp, kPaged>;
  if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
  return launch(limits, kernel,
                {.grid = dim3(static_cast<unsigned>(how.blocks)),
                 .block = dim3(kThreads),
                 .shared_bytes = how.shared_bytes,
                 .stream = stream,
                 .cluster = how.cluster},
                plan);
}

}  // namespace kvlab::kernels
