// Programmatic dependent launch: a kernel may start while the previous kernel in the stream still
// runs, and load data that the previous kernel does not write. Before sm_90 both functions do
// nothing, and are not needed.
#pragma once

namespace kvlab::kernels {

/// Before this call, the kernel may only read data that no kernel of the same step writes, namely
/// weights and tables. After it, all earlier work of the stream is complete and visible. Every
/// kernel that `launch` starts must call this function in every thread block, even if the kernel
/// needs no results of earlier kernels. Otherwise this kernel could end before an earlier kernel,
/// and the next kernel, which waits only for this one, could read results that are not complete.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel of the stream start once all thread blocks of this kernel have called this.
__device__ inline void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace kvlab::kernels
