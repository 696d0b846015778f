#include "kernels/loaded_code.hpp"

#include <algorithm>

#include "kernels/device_limits.hpp"

namespace kvlab::kernels {
namespace {

/// An empty kernel, compiled with the same options and architectures as all kernels of the library.
__global__ void compiled_as_all() {}

/// The limits that SmallerGpu sets. 0: no limit.
thread_local int max_shared_bytes = 0, max_multiprocessors = 0;

cudaError_t ask(int device, DeviceLimits& limits) {
  cudaError_t error = cudaSuccess;
  const auto attribute = [&](int& value, cudaDeviceAttr which) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, which, device);
  };
  attribute(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  attribute(limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int architecture = 0;
  if (error == cudaSuccess) error = loaded_architecture(architecture);
  limits.early_start = architecture >= 90;
  return error;
}

}  // namespace

cudaError_t loaded_architecture(int& architecture) {
  cudaFuncAttributes code{};
  const cudaError_t error = cudaFuncGetAttributes(&code, compiled_as_all);
  architecture = error == cudaSuccess ? code.ptxVersion : 0;  // __CUDA_ARCH__ / 10
  return error;
}

cudaError_t device_limits(DeviceLimits& limits) {
  thread_local int known_device = -1;
  thread_local DeviceLimits known;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (device != known_device) {
    DeviceLimits requested;
    if (const cudaError_t error = ask(device, requested)) return error;
    known = requested, known_device = device;
  }
  limits = known;
  const auto lower = [](int& limit, int max) {
    if (max > 0) limit = std::min(limit, max);
  };
  lower(limits.shared_bytes, max_shared_bytes);
  lower(limits.multiprocessors, max_multiprocessors);
  return cudaSuccess;
}

SmallerGpu::SmallerGpu(int shared_bytes, int multiprocessors) {
  max_shared_bytes = shared_bytes, max_multiprocessors = multiprocessors;
}
SmallerGpu::~SmallerGpu() { max_shared_bytes = max_multiprocessors = 0; }

}  // namespace kvlab::kernels
