// What the CTAs of a cluster (sm_90) do together: a barrier, and stores to each other's shared
// memory. Nothing of it does anything on devices before.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// This CTA's number in its cluster.
__device__ inline int cluster_rank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// By all threads of all CTAs, by turns: what a thread has stored before it arrives can be seen
/// behind the wait. Behind the first wait all CTAs have begun, and not before.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
/// The address that `here`, in this CTA's shared memory, has in that of another.
__device__ inline std::uint32_t address_in(int rank, const void* here) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(here)), "r"(rank));
  return there;
}
#endif
/// Stores to the place that `here` has in another CTA.
__device__ inline void store_in(int rank, const float4* here, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in(rank, here)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#endif
}
__device__ inline void store_in(int rank, const float2* here, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in(rank, here)),
               "f"(value.x), "f"(value.y)
               : "memory");
#endif
}

}  // namespace kvlab::kernels
