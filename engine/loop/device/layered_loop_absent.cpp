// The closed loop on a device, of a build without CUDA.
#include <stdexcept>

#include "engine/loop/device/layered_loop.hpp"

namespace kvlab {

Sweep sweep_by_device_layers(const DeviceModel&, BatchBackend&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

}  // namespace kvlab
