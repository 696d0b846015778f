// The eviction order among the threads of a warp and of a block.
#pragma once

#include <cstdint>

#include "kernels/device/reduce.cuh"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

/// A slot that may be evicted, and its eviction key.
struct EvictionCandidate {
  EvictionKey key;
  int slot;

  /// Comes after every token in the order.
  __device__ static EvictionCandidate none() { return {{~0u, ~std::uint64_t{0}, ~0u}, -1}; }
};

__device__ inline EvictionCandidate first_victim(const EvictionCandidate& a,
                                                 const EvictionCandidate& b) {
  return b.key < a.key ? b : a;
}

/// The first victim among the warp's candidates, in every lane.
__device__ inline EvictionCandidate warp_first_victim(EvictionCandidate mine) {
  // Compares word by word; only lanes that have the least of all earlier words stay in.
  bool first = true;
  const auto least = [&](std::uint32_t word) {
    const std::uint32_t of_all = __reduce_min_sync(~0u, first ? word : ~0u);
    first &= word == of_all;
    return of_all;
  };
  const std::uint32_t protection = least(mine.key.protection),
                      upper = least(static_cast<std::uint32_t>(mine.key.rank >> 32)),
                      lower = least(static_cast<std::uint32_t>(mine.key.rank)),
                      position = least(mine.key.position);
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, first))) - 1;
  return {{protection, std::uint64_t{upper} << 32 | lower, position},
          __shfl_sync(~0u, mine.slot, lane)};
}

/// The first victim among the block's candidates, in the first warp. `of_warps`: one element per
/// warp, free again after the next barrier.
__device__ inline EvictionCandidate block_first_victim(EvictionCandidate mine,
                                                       EvictionCandidate* of_warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  mine = warp_first_victim(mine);
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  if (warp != 0) return mine;
  return warp_first_victim(lane < warps ? of_warps[lane] : EvictionCandidate::none());
}

}  // namespace kvlab::kernels
