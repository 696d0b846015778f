// Signals between blocks of a grid, through global memory.
//
// One thread of a block signals for the block behind a __syncthreads(): what the block wrote before
// is then visible to whoever has seen the signal.
#pragma once

#include <cstdint>

namespace kvlab::kernels {

/// Counts this block; returns how many came before it.
__device__ inline int arrive(std::int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

}  // namespace kvlab::kernels
