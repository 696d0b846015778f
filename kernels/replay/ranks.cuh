// How modifiers change a cache's ranks before many tokens are evicted. With `scope=layer`, ranks
// are summed over a layer's KV heads. Smoothing combines the ranks of tokens that are close in age.
#pragma once

#include "kernels/device/cluster.cuh"
#include "kernels/replay/replay.hpp"
#include "policies/modifiers/pooled_rank.hpp"

namespace kvlab::kernels {

/// Replaces every rank by the sum over the layer's KV heads. The thread blocks of a cluster do this
/// together, one per head. Their caches have the same tokens in the same slots, [first_slot,
/// first_slot + live) of each head task. Uses the observations as scratch memory; they are not
/// needed between two appends.
__device__ __noinline__ inline void sum_layer_ranks(const ReplayWalkArgs& args, int task,
                                                    std::int64_t first_slot, std::uint32_t live,
                                                    RankType type) {
  const ReplaySlots& slots = args.slots;
  const int first_task = task / args.layer_heads * args.layer_heads;
  const std::int64_t own = task * slots.task_stride + first_slot;
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x) {
    const auto rank_of = [&](int head) {
      return slots.ranks[(first_task + head) * slots.task_stride + first_slot + i];
    };
    std::uint64_t sum = rank_of(0);
    for (int head = 1; head < args.layer_heads; ++head) sum = rank_sum(type, sum, rank_of(head));
    slots.seen[own + i].mass = sum;
  }
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x)
    slots.ranks[own + i] = slots.seen[own + i].mass;
  __syncthreads();
}

/// The live tokens of a cache, and scratch memory for each of them.
struct RanksToSmooth {
  std::uint64_t* ranks;             // [slot]
  const std::uint32_t* positions;   // [slot]
  const std::uint32_t* live_words;  // bits of the live positions
  std::uint32_t live;
  Observation* by_age;  // [slot]: the `mass` fields hold ranks, ordered by age
  std::uint32_t* ages;  // [slot]
};

/// The number of live tokens that are older than the token at `position`.
__device__ inline std::uint32_t age_of(std::uint32_t position, const std::uint32_t* live_words) {
  std::uint32_t older = __popc(live_words[position / 32] & ((1u << position % 32) - 1));
  for (std::uint32_t w = 0; w < position / 32; ++w) older += __popc(live_words[w]);
  return older;
}

/// Smooths the ranks: replaces each by the mean or the maximum (modifiers.pool) of the ranks of the
/// live tokens that are at most modifiers.smooth away by age. Called by the whole thread block.
__device__ __noinline__ void smooth_ranks(const RanksToSmooth tokens, const Modifiers modifiers,
                                          RankType type) {
  for (std::uint32_t i = threadIdx.x; i < tokens.live; i += blockDim.x) {
    tokens.ages[i] = age_of(tokens.positions[i], tokens.live_words);
    tokens.by_age[tokens.ages[i]].mass = tokens.ranks[i];
  }
  __syncthreads();
  const std::uint32_t reach = min(modifiers.smooth, tokens.live);
  for (std::uint32_t i = threadIdx.x; i < tokens.live; i += blockDim.x) {
    const std::uint32_t age = tokens.ages[i], end = min(age + reach + 1, tokens.live);
    PooledRank pooled(modifiers.pool, type);
    for (std::uint32_t a = age - min(age, reach); a < end; ++a) pooled.take(tokens.by_age[a].mass);
    tokens.ranks[i] = pooled.value();
  }
  __syncthreads();
}

}  // namespace kvlab::kernels
