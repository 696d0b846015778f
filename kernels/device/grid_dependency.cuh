// Programmatic dependent launch: a kernel may start while the kernel before it in the stream still
// runs, and fetch data that this one does not write. Before sm_90 both calls do nothing, and
// neither is needed.
#pragma once

namespace kvlab::kernels {

/// Before this call the kernel may read only what no kernel of the same step writes: weights and
/// tables. After it, all earlier work of the stream is complete and visible. Every kernel that
/// `launch` starts must call it in every block, even if it has nothing to wait for, because the
/// next kernel relies on it.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel of the stream start once all blocks of this one have made this call.
__device__ inline void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace kvlab::kernels
