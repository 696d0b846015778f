// Copies to shared memory by the copy engine (sm_90): one thread starts the copy, which completes a
// phase of a barrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/device/barrier.cuh"

namespace kvlab::kernels {

/// Copies the box of a tensor at (x, y, z), laid out as its tensor map describes.
__device__ inline void copy_box(void* to, const CUtensorMap& map, int x, int y, int z,
                                const PhaseBarrier& arrives) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(arrives.address())
      : "memory");
}

/// Copies consecutive bytes, a multiple of 16.
__device__ inline void copy_bulk(void* to, const void* from, std::uint32_t bytes,
                                 const PhaseBarrier& arrives, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(arrives.address()), "l"(policy)
      : "memory");
}
__device__ inline void copy_bulk(void* to, const void* from, std::uint32_t bytes,
                                 const PhaseBarrier& arrives) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(arrives.address())
      : "memory");
}

}  // namespace kvlab::kernels
