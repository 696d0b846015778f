// Which of its code the driver loaded for a GPU: machine code of that GPU, or PTX that it compiled.
// And a GPU that has less than it has.
#pragma once

#include <cuda_runtime_api.h>

namespace kvlab::kernels {

/// __CUDA_ARCH__ / 10 of the library's kernels on the current device: 80 on an H100 where a build
/// has code of sm_80 only. An error where no code of this build runs on it.
cudaError_t loaded_architecture(int& architecture);

/// While it lives, this thread plans launches as for a GPU whose thread blocks have at most so much
/// shared memory. So a large GPU tests what a small one runs. One at a time.
class SmallerGpu {
 public:
  explicit SmallerGpu(int shared_bytes);
  ~SmallerGpu();
  SmallerGpu(const SmallerGpu&) = delete;
  SmallerGpu& operator=(const SmallerGpu&) = delete;
};

}  // namespace kvlab::kernels
