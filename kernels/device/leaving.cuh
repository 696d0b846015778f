// The order of leaving among the threads of a warp and of a block.
#pragma once

#include <cstdint>

#include "kernels/device/reduce.cuh"
#include "policies/rule.hpp"

namespace kvlab::kernels {

/// A slot that may leave, and its place in the order.
struct Leaving {
  LeavingKey key;
  int slot;

  /// Leaves after every token.
  __device__ static Leaving none() { return {{~0u, ~std::uint64_t{0}, ~0u}, -1}; }
};

__device__ inline Leaving first_to_leave(const Leaving& a, const Leaving& b) {
  return b.key < a.key ? b : a;
}

/// The first among the warp's, in every lane.
__device__ inline Leaving warp_first_to_leave(Leaving mine) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const Leaving other{{__shfl_xor_sync(~0u, mine.key.guard, distance),
                         __shfl_xor_sync(~0u, mine.key.rank, distance),
                         __shfl_xor_sync(~0u, mine.key.position, distance)},
                        __shfl_xor_sync(~0u, mine.slot, distance)};
    mine = first_to_leave(mine, other);
  }
  return mine;
}

/// The first among the block's, in the first warp. `of_warps`: one for each; free again after the
/// next barrier.
__device__ inline Leaving block_first_to_leave(Leaving mine, Leaving* of_warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  mine = warp_first_to_leave(mine);
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  if (warp != 0) return mine;
  return warp_first_to_leave(lane < warps ? of_warps[lane] : Leaving::none());
}

}  // namespace kvlab::kernels
