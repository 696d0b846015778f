// Operations of the CTAs of a cluster (sm_90): a barrier, and stores to each other's shared memory.
// On devices before sm_90 they do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// This CTA's rank in its cluster.
__device__ inline int cluster_rank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// All threads of all CTAs call cluster_arrive() and cluster_wait() alternately. What a thread
/// stores before it arrives is visible after the wait. Before the end of the first wait, other CTAs
/// of the cluster may not have started.
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
/// The address in CTA `rank` that corresponds to `here` in this CTA's shared memory.
__device__ inline std::uint32_t address_in(int rank, const void* here) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(here)), "r"(rank));
  return there;
}
#endif
/// Stores `value` at the address in CTA `rank` that corresponds to `here`.
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
