// Launches a kernel that may start before its predecessor in the stream has ended.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/device_limits.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {

struct Launch {
  dim3 grid, block;
  std::size_t shared_bytes = 0;  ///< dynamic shared memory
  cudaStream_t stream = nullptr;
  unsigned cluster = 0;  ///< thread blocks per cluster (sm_90); 0: no clusters
};

/// Lets a kernel use all dynamic shared memory of the device. Also requests that multiprocessors
/// use as much of their L1 memory as possible as shared memory. Two kernels run on one
/// multiprocessor at the same time only if both request the same split.
template <class... Params>
cudaError_t allow_shared_memory(void (*kernel)(Params...), const DeviceLimits& limits) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

/// Calls enqueue(config) to launch a kernel that calls wait_for_predecessor()
/// (device/grid_dependency.cuh).
template <class Enqueue>
cudaError_t launch_by(const DeviceLimits& limits, const Launch& where, Enqueue enqueue) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (limits.early_start) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (where.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {where.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = where.grid;
  config.blockDim = where.block;
  config.dynamicSmemBytes = where.shared_bytes;
  config.stream = where.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return enqueue(&config);
}

/// Launches a kernel, given as a function.
template <class... Params, class... Args>
cudaError_t launch(const DeviceLimits& limits, void (*kernel)(Params...), const Launch& where,
                   Args&&... args) {
  return launch_by(limits, where, [&](const cudaLaunchConfig_t* config) {
    return cudaLaunchKernelEx(config, kernel, std::forward<Args>(args)...);
  });
}

/// Launches a kernel, given as a function address or a cudaKernel_t, with the addresses of its
/// parameters.
inline cudaError_t launch(const DeviceLimits& limits, const void* kernel, const Launch& where,
                          void** parameters) {
  return launch_by(limits, where, [&](const cudaLaunchConfig_t* config) {
    return cudaLaunchKernelExC(config, kernel, parameters);
  });
}

}  // namespace kvlab::kernels
