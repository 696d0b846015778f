// The choice of the one token that is evicted for the next.
#pragma once

#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// A token that may be evicted, ordered by rank, then by position. Protected tokens are not
/// candidates. A full cache has at least one unprotected token, because sinks and recent tokens fit
/// its budget.
struct Candidate {
  std::uint64_t rank = ~std::uint64_t{0};
  std::uint32_t position = ~0u;
  std::uint32_t slot = 0;

  __device__ bool before(const Candidate& other) const {
    return rank < other.rank || (rank == other.rank && position < other.position);
  }
  __device__ void take(const Candidate& other) {
    if (other.before(*this)) *this = other;
  }
};

/// The first candidate of the warp, in every lane.
__device__ inline Candidate warp_first(const Candidate& mine) {
  const auto high = static_cast<std::uint32_t>(mine.rank >> 32),
             low = static_cast<std::uint32_t>(mine.rank);
  const std::uint32_t min_high = __reduce_min_sync(~0u, high);
  bool first = high == min_high;
  const std::uint32_t min_low = __reduce_min_sync(~0u, first ? low : ~0u);
  first &= low == min_low;
  const std::uint32_t least = __reduce_min_sync(~0u, first ? mine.position : ~0u);
  first &= mine.position == least;
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, first))) - 1;
  return {std::uint64_t{min_high} << 32 | min_low, least, __shfl_sync(~0u, mine.slot, lane)};
}

/// The first candidate of the block, in every thread. `of_warps`: free again after the next
/// barrier.
__device__ inline Candidate block_first(const Candidate& mine, uint4* of_warps,
                                        const CacheThread& at) {
  const Candidate own = warp_first(mine);
  if (at.lane == 0)
    of_warps[at.warp] = {static_cast<std::uint32_t>(own.rank >> 32),
                         static_cast<std::uint32_t>(own.rank), own.position, own.slot};
  __syncthreads();
  Candidate other;
  if (at.lane < at.warps) {
    const uint4 packed = of_warps[at.lane];
    other = {std::uint64_t{packed.x} << 32 | packed.y, packed.z, packed.w};
  }
  return warp_first(other);
}

}  // namespace kvlab::kernels
