#include "kernels/host/check.hpp"

#include <fmt/format.h>

#include <array>

#include "kernels/device_limits.hpp"

namespace kvlab::cuda {
namespace {

/// Whether the process can no longer use the device after this error. CUDA reports a GPU that has
/// fallen off the bus as an unknown error.
bool is_lost(cudaError_t error) {
  constexpr std::array lost{cudaErrorIllegalAddress,
                            cudaErrorLaunchFailure,
                            cudaErrorLaunchTimeout,
                            cudaErrorECCUncorrectable,
                            cudaErrorNvlinkUncorrectable,
                            cudaErrorHardwareStackError,
                            cudaErrorIllegalInstruction,
                            cudaErrorMisalignedAddress,
                            cudaErrorInvalidAddressSpace,
                            cudaErrorInvalidPc,
                            cudaErrorAssert,
                            cudaErrorDevicesUnavailable,
                            cudaErrorUnknown};
  for (const cudaError_t one : lost)
    if (error == one) return true;
  return false;
}

}  // namespace

void check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  if (is_lost(error))
    throw Error(error, fmt::format("CUDA: {} failed, because the device was lost ({}: {}); this "
                                   "process cannot use it any more, so restart the process",
                                   what, cudaGetErrorName(error), cudaGetErrorString(error)));
  cudaGetLastError();  // clears the error, so that the next call does not fail too
  if (kernels::is_without_code(error))
    throw Error(error, fmt::format("CUDA: {} failed: {}", what, kernels::why_not_device()));
  throw Error(error, fmt::format("CUDA: {} failed: {} ({})", what, cudaGetErrorString(error),
                                 cudaGetErrorName(error)));
}

std::string bytes_text(std::uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes >= 1u << 30) return fmt::format("{:.2f} GiB", value / 0x1p30);
  if (bytes >= 1u << 20) return fmt::format("{:.1f} MiB", value / 0x1p20);
  return fmt::format("{} bytes", bytes);
}

MemoryInfo memory_info() {
  std::size_t free = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  if (error == cudaErrorMemoryAllocation)  // the first call creates the context, which needs memory
    throw Error(error,
                "device memory: other programs use so much of it that CUDA cannot start; it needs "
                "about 600 MiB, plus the weights and the cache");
  check(error, "reading how much device memory is free");
  return {free, total};
}

bool has_device() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count > 0;
  cudaGetLastError();
  return false;
}

std::string device_name() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "querying the device's name");
  return properties.name;
}

}  // namespace kvlab::cuda
