// Signals between blocks of a grid, or of two grids that overlap, through global memory.
//
// One thread of a block signals for the block behind a __syncthreads(), and waits for it before
// one: what the block wrote before is then visible to whoever has seen the signal.
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

__device__ inline void raise_flag(std::int32_t* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

/// Only for a flag that blocks raise which are running already: nothing else is sure to get room.
__device__ inline void wait_for_flag(const std::int32_t* flag) {
  constexpr unsigned kPause = 32;  // nanoseconds
  for (;;) {
    int raised;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    if (raised != 0) return;
    __nanosleep(kPause);
  }
}

}  // namespace kvlab::kernels
