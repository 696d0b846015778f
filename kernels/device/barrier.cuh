// Barriers in shared memory on which asynchronous copies can arrive, and barriers for some warps of
// a thread block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// An mbarrier (sm_80). Each phase completes after a fixed number of arrivals. A waiting thread
/// identifies the phase by its parity. The phase before the first one counts as complete and has
/// parity 1.
class PhaseBarrier {
 public:
  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address())
                 : "memory");
  }
  /// Arrives, and makes the phase wait for `bytes` bytes from the copy engine (sm_90).
  __device__ void arrive_and_expect(std::uint32_t bytes) {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
            address()),
        "r"(bytes)
        : "memory");
  }
  /// Arrives once all copies that this thread has started are complete.
  __device__ void arrive_when_copied() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
  }
  /// Keeps the phase open until all copies that this thread has started are complete.
  __device__ void expect_copied() {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(address()) : "memory");
  }
  __device__ void wait(unsigned parity) {
    while (!complete(parity)) {
    }
  }

  __device__ std::uint32_t address() const { return shared_address(&word_); }

 private:
  __device__ bool complete(unsigned parity) const {
    unsigned done;
#if __CUDA_ARCH__ >= 900  // try_wait suspends the thread for a while
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
#endif
    return done != 0;
  }

  std::uint64_t word_;
};

/// A barrier for the first kThreads threads of a thread block.
template <int kThreads>
__device__ inline void barrier_of_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace kvlab::kernels
