// Which code the driver loaded for a GPU: machine code for that GPU, or PTX that the driver
// compiled. Also simulates a smaller GPU, for tests.
#pragma once

#include <cuda_runtime_api.h>

namespace kvlab::kernels {

/// __CUDA_ARCH__ / 10 of the library's kernels on the current device. It is 80 on an H100 if the
/// build has code for sm_80 only. Returns an error if no code of this build runs on the device.
cudaError_t loaded_architecture(int& architecture);

/// During its lifetime, this thread plans launches for a GPU whose thread blocks have at most this
/// much shared memory, and which has at most this number of multiprocessors; 0: no limit. So a
/// large GPU can test what a small GPU runs. With few multiprocessors, each thread block handles
/// many tiles even if there are few tokens. Use one at a time.
class SmallerGpu {
 public:
  explicit SmallerGpu(int shared_bytes, int multiprocessors = 0);
  ~SmallerGpu();
  SmallerGpu(const SmallerGpu&) = delete;
  SmallerGpu& operator=(const SmallerGpu&) = delete;
};

}  // namespace kvlab::kernels
