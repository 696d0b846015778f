// Ranks that the KV heads of a layer share: for scope=layer.
#pragma once

#include "kernels/device/cluster.cuh"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

/// Every rank becomes the sum over the layer's KV heads: by the blocks of a cluster, a block for
/// each head. Their caches have the same tokens in the same slots, [first_slot, first_slot + live)
/// of each unit's. What was seen is of no account between two admissions.
__device__ __noinline__ inline void sum_layer_ranks(const ReplayArgs& args, int unit,
                                                    std::int64_t first_slot, std::uint32_t live) {
  const ReplayCaches& caches = args.caches;
  const int first_unit = unit / args.layer_heads * args.layer_heads;
  const std::int64_t own = unit * caches.unit_slots + first_slot;
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x) {
    std::uint64_t sum = 0;
    for (int head = 0; head < args.layer_heads; ++head)
      sum = saturating_sum(sum,
                           caches.ranks[(first_unit + head) * caches.unit_slots + first_slot + i]);
    caches.seen[own + i].mass = sum;
  }
  cluster_arrive();
  cluster_wait();
  for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x)
    caches.ranks[own + i] = caches.seen[own + i].mass;
  __syncthreads();
}

}  // namespace kvlab::kernels
