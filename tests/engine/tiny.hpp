// The bundled model. Each test program loads it once.
#pragma once

#include <string>

#include "engine/backend.hpp"

namespace kvlab {

inline const std::string kTinyModel = KVLAB_SOURCE_DIR "/engine/models/tiny";

inline Backend& tiny() {
  static const auto backend = load_backend(Device::cpu, kTinyModel, 2);
  return *backend;
}

}  // namespace kvlab
