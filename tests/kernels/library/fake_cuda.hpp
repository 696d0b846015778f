// A fake CUDA runtime, so that code on the host can be tested without a device. Device memory is
// host memory, copies work, and kernels do nothing. A test links fake_cuda.cpp instead of the
// runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvlab::fake_cuda {

/// Number of kernels that were launched since the program began.
int launches();
/// Sets what cudaStreamIsCapturing() reports for all streams.
void set_capturing(bool capturing);
/// Makes allocations fail that would raise the total above `bytes` bytes.
void set_memory(std::size_t bytes);
/// Bytes that are allocated now.
std::size_t allocated();

}  // namespace kvlab::fake_cuda
