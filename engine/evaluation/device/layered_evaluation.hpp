// The end-to-end evaluation on a CUDA device, layer by layer: rows of all configurations through
// one product, attention by the device replay.
#pragma once

#include "engine/bench.hpp"
#include "engine/evaluation/eval.hpp"

namespace kvlab {

/// As layer_sweep_runner() of a model on the CPU, of one in device memory, which must outlive it.
/// As many configurations go side by side as fit the device's memory. The sweep throws
/// std::invalid_argument for what evaluate_by_layers() refuses, budgets by head and thresholds that
/// differ; std::runtime_error where not even one configuration fits.
/// What of a model is not replayed layer by layer on a device; empty: nothing.
std::string beyond_device_layers(const ModelConfig& config);

SweepRunner device_layer_sweep_runner(const DeviceModel& model);

/// What it costs, beside the floor of its products.
struct EvalBenchOptions {
  BenchModel model;
  std::vector<CacheConfig> configs;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  unsigned threads = 1;
};
/// Throws as bench_decode() does.
nlohmann::ordered_json bench_eval(const EvalBenchOptions& options);

}  // namespace kvlab
