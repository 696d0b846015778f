// The functions of the end-to-end evaluation on a device, for a build without CUDA.
#include <stdexcept>

#include "engine/evaluation/device/layered_evaluation.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

std::string beyond_device_layers(const ModelConfig&) { return ""; }

SweepRunner device_layer_sweep_runner(const DeviceModel&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

nlohmann::ordered_json bench_eval(const EvalBenchOptions&) {
  throw std::invalid_argument(
      "this command measures the end-to-end evaluation on CUDA, which is not in this build; `cmake "
      "--preset cuda` builds it");
}

}  // namespace kvlab
