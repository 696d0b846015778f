// Ranks that the KV heads of a layer share: for scope=layer.
#pragma once

#include "kernels/device/cluster.cuh"
#include "kernels/replay/replay.hpp"
#include "policies/rank.hpp"

namespace kvlab::kernels {

/// Every rank becomes the sum over the layer's KV heads: by the blocks of a cluster, a block for
/// each head. Their caches have the same tokens in the same slots, [first_slot, first_slot + live)
/// of each unit's. What was seen is of no account between two admissions.
__device__ __noinline__ inline void sum_layer_ranks(const ReplayArgs& args, int unit,
                                                    std::int64_t first_slot, std::uint32_t live,
                                                    RankType type) {
  const ReplayCaches& caches = args.caches;
  const int first_unit = unit / args.layer_heads * args.layer_heads;
  const std::int64_t own = unit * caches.unit_slots + first_slot;
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x) {
    const auto rank_of = [&](int head) {
      return caches.ranks[(first_unit + head) * caches.unit_slots + first_slot + i];
    };
    std::uint64_t sum = rank_of(0);
    for (int head = 1; head < args.layer_heads; ++head) sum = rank_sum(type, sum, rank_of(head));
    caches.seen[own + i].mass = sum;
  }
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x)
    caches.ranks[own + i] = caches.seen[own + i].mass;
  __syncthreads();
}

}  // namespace kvlab::kernels
