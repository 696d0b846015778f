// Which of its code the driver loaded for a GPU: machine code of that GPU, or PTX that it compiled.
#pragma once

#include <cuda_runtime_api.h>

namespace kvlab::kernels {

/// __CUDA_ARCH__ / 10 of the library's kernels on the current device: 80 on an H100 where a build
/// has code of sm_80 only. An error where no code of this build runs on it.
cudaError_t loaded_architecture(int& architecture);

}  // namespace kvlab::kernels
