// Calls Thrust in functions that return a CUDA error, as all launchers do.
#pragma once

#include <cuda_runtime_api.h>
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>

#include <new>

namespace kvlab::kernels {

/// Calls `algorithms(policy)`, which enqueues Thrust algorithms on the stream. Only algorithms that
/// return a value wait for the stream. Thrust throws on errors; this returns the CUDA error
/// instead.
template <class Algorithms>
cudaError_t thrust_status(cudaStream_t stream, Algorithms algorithms) {
  try {
    algorithms(thrust::cuda::par_nosync.on(stream));
    return cudaGetLastError();
  } catch (const thrust::system_error& error) {
    return static_cast<cudaError_t>(error.code().value());
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}

}  // namespace kvlab::kernels
