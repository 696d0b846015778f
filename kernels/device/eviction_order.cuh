// Finds the token that comes first in the eviction order, among the threads of a warp or of a
// thread block.
#pragma once

#include <cstdint>

#include "kernels/device/reduce.cuh"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

/// The first victim among the candidates of the warp, returned in every lane. kUnprotected: the
/// caller guarantees that no candidate is protected, so protections are not compared.
template <bool kUnprotected = false>
__device__ inline EvictionCandidate warp_first_victim(const EvictionCandidate& mine) {
  // Compares the keys word by word. A lane remains a candidate only while it has the minimum of
  // every word so far.
  bool first = true;
  const auto warp_min = [&](std::uint32_t word) {
    const std::uint32_t lowest = __reduce_min_sync(~0u, first ? word : ~0u);
    first &= word == lowest;
    return lowest;
  };
  std::uint32_t protection = 0;
  if constexpr (!kUnprotected) protection = warp_min(mine.key.protection);
  const std::uint32_t upper = warp_min(static_cast<std::uint32_t>(mine.key.rank >> 32)),
                      lower = warp_min(static_cast<std::uint32_t>(mine.key.rank)),
                      position = warp_min(mine.key.position);
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, first))) - 1;
  return {{protection, std::uint64_t{upper} << 32 | lower, position},
          __shfl_sync(~0u, mine.slot, lane)};
}

/// The first victim among the candidates of the thread block, returned in every thread.
/// `warp_victims`: one element per warp, which may be reused after the next barrier.
template <bool kUnprotected = false>
__device__ inline EvictionCandidate block_first_victim(const EvictionCandidate& mine,
                                                       EvictionCandidate* warp_victims) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  const EvictionCandidate warp_victim = warp_first_victim<kUnprotected>(mine);
  if (lane == 0) warp_victims[warp] = warp_victim;
  __syncthreads();
  EvictionCandidate other = EvictionCandidate::none();
  if (lane < warps) other = warp_victims[lane];
  return warp_first_victim<kUnprotected>(other);
}

}  // namespace kvlab::kernels
