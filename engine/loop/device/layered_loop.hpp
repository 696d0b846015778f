// The closed loop on a CUDA device, layer by layer: rows of all configurations through one product,
// attention by the device replay.
#pragma once

#include "engine/bench.hpp"
#include "engine/loop/eval.hpp"

namespace kvlab {

/// As sweep_by_layers() of a model on the CPU, of one in device memory, which must outlive it. As
/// many configurations go side by side as fit the device's memory. The sweep throws
/// std::invalid_argument for what run_closed_loop() refuses, budgets by head and thresholds that
/// differ; std::runtime_error where not even one configuration fits.
/// What of a model is not replayed layer by layer on a device; empty: nothing.
std::string beyond_device_layers(const ModelConfig& config);

Sweep sweep_by_device_layers(const DeviceModel& model);

/// What it costs, beside the floor of its products.
struct LoopBenchOptions {
  BenchModel model;
  std::vector<CacheConfig> configs;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  unsigned threads = 1;
};
/// Throws as bench_decode() does.
nlohmann::ordered_json bench_loop(const LoopBenchOptions& options);

}  // namespace kvlab
