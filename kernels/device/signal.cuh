// Signals between the thread blocks of a grid, through global memory.
//
// One thread signals for its block after a __syncthreads(). Everything that the block wrote before
// is then visible to every thread that has read the signal.
#pragma once

#include <cstdint>

namespace kvlab::kernels {

/// Counts this thread block as arrived, and returns the number of blocks that arrived before it.
__device__ inline int arrive(std::int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

}  // namespace kvlab::kernels
