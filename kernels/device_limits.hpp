// The resources of a GPU that a kernel launch may use, and the code of this build that the GPU
// runs.
//
// A launch plan is a pure function of a shape and of DeviceLimits, so tests can check plans for
// GPUs that the machine does not have.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace kvlab::kernels {

struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  ///< maximum shared memory of a thread block, in bytes
  /// Whether the loaded code was compiled for sm_90 or later, so that programmatic dependent launch
  /// and clusters work. They do not work on a GPU of compute capability 9.0 that runs PTX of sm_80.
  bool early_start = false;
};

/// The limits of the current device. Returns an error if there is no device or this build has no
/// code for it.
cudaError_t device_limits(DeviceLimits& limits);

/// The resources of one launch.
struct LaunchPlan {
  int blocks = 0;  ///< 0: no plan fits
  int stages = 0;  ///< stages of the ring in shared memory, if the kernel has one
  int rows = 0;    ///< number of rows that one launch handles, if a call may need several launches
  /// dynamic shared memory in bytes; if no plan fits, the minimum that a thread block needs
  std::size_t shared_bytes = 0;
  unsigned cluster = 0;  ///< thread blocks per cluster; 0: no clusters

  bool fits() const { return blocks > 0; }
};

/// Whether a call failed because this build has no code for the device.
bool is_without_code(cudaError_t error);
/// The reason why kvlab does not run on the current device: there is no device, it is too old, or
/// this build has no code for it. Empty if kvlab runs.
std::string why_not_device();
/// The same for a GPU of compute capability major.minor on which loading a kernel returned
/// `loaded`.
std::string why_not_device(int major, int minor, cudaError_t loaded);

/// CMAKE_CUDA_ARCHITECTURES of this build, separated by spaces.
std::string_view built_architectures();
/// Lines that describe this build's CUDA code, the driver and each GPU, or that say there is no
/// GPU.
std::string cuda_description();

}  // namespace kvlab::kernels
