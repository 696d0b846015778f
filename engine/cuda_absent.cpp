// The CUDA backend of a build without it.
#include <stdexcept>

#include "engine/backend.hpp"

namespace kvlab {

bool cuda_in_build() { return false; }
bool has_cuda_device() { return false; }

std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

}  // namespace kvlab
