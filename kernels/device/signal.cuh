// Signals between the thread blocks of a grid, through global memory.
//
// One thread signals for its block after a __syncthreads(). What the block wrote before is then
// visible to every thread that has seen the signal.
#pragma once

#include <cstdint>

namespace kvlab::kernels {

/// Counts this thread block, and returns how many blocks arrived before it.
__device__ inline int arrive(std::int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

}  // namespace kvlab::kernels
