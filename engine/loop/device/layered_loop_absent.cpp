// The closed loop on a device, of a build without CUDA.
#include <stdexcept>

#include "engine/loop/device/layered_loop.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

std::string beyond_device_layers(const ModelConfig&) { return ""; }

Sweep sweep_by_device_layers(const DeviceModel&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

nlohmann::ordered_json bench_loop(const LoopBenchOptions&) {
  throw std::invalid_argument("it measures the closed loop on CUDA, which is not in this build");
}

}  // namespace kvlab
