// The backend on the CPU, of a model that is loaded already.
#pragma once

#include <memory>

#include "engine/backend.hpp"

namespace kvlab {

/// Shares the model's weights.
std::unique_ptr<Backend> cpu_backend(const Model& model, unsigned threads);

}  // namespace kvlab
