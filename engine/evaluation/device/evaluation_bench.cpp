// Times the end-to-end evaluation on a device, and computes the shortest possible time of its
// matrix products.
#include <algorithm>
#include <chrono>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/evaluation/device/layered_evaluation.hpp"

namespace kvlab {
namespace {

constexpr int kRepeats = 3;  // the fastest of these runs counts

/// Operations of all products of one configuration: every token goes through the layers, and scored
/// tokens also through the head.
double product_flops(const ModelConfig& config, double tokens, double scored) {
  const double heads = config.query_heads + 2.0 * config.kv_heads,
               layer_products = config.hidden * ((heads + config.query_heads) * config.head_size +
                                                 3.0 * config.mlp);
  return 2 * (tokens * config.layers * layer_products + scored * config.hidden * config.vocab);
}

}  // namespace

nlohmann::ordered_json bench_eval(const EvalBenchOptions& options) {
  const DeviceModel model = bench_model(options.model);
  const SweepRunner run_sweep = device_layer_sweep_runner(model);
  const EvalOptions how{.prompt_tokens = options.prompt_tokens, .threads = options.threads};
  const std::vector<std::vector<std::int32_t>> ids{bench_ids(options.tokens, model.config().vocab)};
  double seconds = 0;
  for (int run = 0; run <= kRepeats; ++run) {  // the first run compiles the policies' kernels
    const auto start = std::chrono::steady_clock::now();
    run_sweep(ids, options.configs, how);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (run > 0) seconds = run == 1 ? taken.count() : std::min(seconds, taken.count());
  }
  const double floor =
      static_cast<double>(options.configs.size()) *
      product_flops(model.config(), options.tokens, options.tokens - options.prompt_tokens - 1.0) /
      matrix_flops_per_second(model.type());
  nlohmann::ordered_json metrics = bench_of("eval", model);
  metrics["configurations"] = options.configs.size();
  metrics["tokens"] = options.tokens;
  metrics["prompt_tokens"] = options.prompt_tokens;
  metrics["seconds"] = seconds;
  metrics["product_seconds_at_least"] = floor;
  metrics["times_the_products"] = seconds / floor;
  return metrics;
}

}  // namespace kvlab
