// What a launch may ask of a GPU, and what code this build has for it.
//
// A launch plan is a pure function of a shape and of DeviceLimits. So a test can run every plan for
// the limits of a GPU that is not there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace kvlab::kernels {

struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  ///< shared memory that a thread block may have at most
  /// The code that the driver loaded was compiled for sm_90 or later: it has programmatic dependent
  /// launch and clusters. A GPU of 9.0 that runs PTX of sm_80 has neither.
  bool early_start = false;
};

/// Of the current device. An error where there is none, or where this build has no code for it.
cudaError_t device_limits(DeviceLimits& limits);

/// What one launch asks of a GPU.
struct LaunchPlan {
  int blocks = 0;                ///< 0: no plan fits
  int stages = 0;                ///< of a ring in shared memory, if there is one
  int rows = 0;                  ///< that one launch takes, where rows are many
  std::size_t shared_bytes = 0;  ///< dynamic; where no plan fits, the least that a block needs
  unsigned cluster = 0;          ///< blocks of a cluster; 0: none

  bool fits() const { return blocks > 0; }
};

/// Whether a call failed because this build has no code for the device.
bool is_without_code(cudaError_t error);
/// Why kvlab does not run on the current device: there is none, it is too old, or this build has no
/// code for it. Empty where it does.
std::string why_not_device();
/// The same for a GPU of compute capability major.minor, where loading a kernel ended with
/// `loaded`.
std::string why_not_device(int major, int minor, cudaError_t loaded);

/// CMAKE_CUDA_ARCHITECTURES of this build, a space between two.
std::string_view built_architectures();
/// Lines about this build's CUDA code, the driver and each GPU. Without a GPU they say so.
std::string cuda_description();

}  // namespace kvlab::kernels
