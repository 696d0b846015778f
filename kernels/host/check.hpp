// Checks the results of CUDA calls. The messages of errors say what failed and what to do about it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvlab::cuda {

struct Error : std::runtime_error {
  Error(cudaError_t error, const std::string& what) : std::runtime_error(what), code(error) {}
  cudaError_t code;
};

/// Throws an Error unless `error` is cudaSuccess; `what` names the action that failed.
void check(cudaError_t error, std::string_view what);

/// Formats a size, such as "1.5 GiB".
std::string bytes_text(std::uint64_t bytes);

/// Device memory in bytes.
struct MemoryInfo {
  std::uint64_t free = 0, total = 0;
};
MemoryInfo memory_info();

/// Whether this machine has a device and a driver for it.
bool has_device();
std::string device_name();

}  // namespace kvlab::cuda
