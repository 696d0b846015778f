// Replaces cuda_replay.cpp in a build without CUDA.
#include <stdexcept>

#include "sim/device/cuda_replay.hpp"

namespace kvlab {

std::unique_ptr<CudaReplayer> cuda_replayer(KeptWatcher) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

}  // namespace kvlab
