// The end-to-end evaluation on a CUDA device, layer by layer: one product computes the rows of all
// configurations, and the device replay computes attention.
#pragma once

#include "engine/bench.hpp"
#include "engine/evaluation/eval.hpp"

namespace kvlab {

/// Says which part of this model cannot be evaluated on a device layer by layer; empty if there is
/// none.
std::string beyond_device_layers(const ModelConfig& config);

/// Like layer_sweep_runner(), for a model in device memory, which must outlive the runner. As many
/// configurations run at the same time as fit into the device's memory. The runner throws
/// std::invalid_argument whenever evaluate_by_layers() would, and also for budgets by head and for
/// configurations with different thresholds. It throws std::runtime_error if not even one
/// configuration fits.
SweepRunner device_layer_sweep_runner(const DeviceModel& model);

/// Times the evaluation, and computes the minimum time that its products take.
struct EvalBenchOptions {
  BenchModel model;
  std::vector<CacheConfig> configs;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  unsigned threads = 1;
};
/// Throws as bench_decode() does.
nlohmann::ordered_json bench_eval(const EvalBenchOptions& options);

}  // namespace kvlab
