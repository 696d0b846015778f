#include <exception>
#include <stdexcept>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/cuda_decoder.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::uint32_t kWarmUpSteps = 4;    // steps
constexpr std::uint32_t kSampledSteps = 16;  // steps timed at each length
constexpr std::uint32_t kLengths = 5;        // lengths at which the full cache's steps are timed

/// Milliseconds of one step of a decoder whose sequences have been filled to `length` tokens with
/// random keys and values.
double step_milliseconds(CudaDecoder& decoder, int batch, std::uint32_t length,
                         std::uint32_t steps) {
  const auto ids = bench_ids(static_cast<std::size_t>(batch), decoder.model().config().vocab);
  decoder.pretend(length);
  for (int row = 0; row < batch; ++row) decoder.set_next(row, ids[static_cast<std::size_t>(row)]);
  for (std::uint32_t i = 0; i < kWarmUpSteps; ++i) decoder.step(batch);
  return milliseconds_of(decoder.stream(),
                         [&] {
                           for (std::uint32_t i = 0; i < steps; ++i) decoder.step(batch);
                         }) /
         steps;
}

std::uint64_t device_bytes(const cuda::MemoryInfo& before) {
  return before.free - cuda::memory_info().free;
}

/// `cache`: the configuration of each sequence; null: the full cache.
CudaDecoderOptions decoder_options(const EvictBenchOptions& options, int batch,
                                   const ResolvedConfig* cache) {
  const std::uint32_t tokens = options.prompt + options.decoded + kWarmUpSteps + kSampledSteps;
  CudaDecoderOptions how{.sequences = batch, .slots = cache ? 0 : tokens, .prefill_tokens = 256};
  if (!cache) return how;
  how.caches.assign(static_cast<std::size_t>(batch), *cache);
  for (int row = 0; row < batch; ++row)
    how.caches[static_cast<std::size_t>(row)].sequence = static_cast<std::uint32_t>(row);
  return how;
}

/// Estimates the time of all steps. A full cache grows, so its steps are timed at several lengths
/// and the times are integrated by the trapezoid rule. A cache that evicts does not grow, so its
/// steps are timed only at the first and the last length.
ordered_json run(const DeviceModel& model, const EvictBenchOptions& options, int batch,
                 const ResolvedConfig* cache) {
  const cuda::MemoryInfo before = cuda::memory_info();
  CudaDecoder decoder(model, decoder_options(options, batch, cache));
  const std::uint32_t points = cache ? 2 : kLengths;
  double sum = 0;
  for (std::uint32_t i = 0; i < points; ++i) {
    const std::uint32_t length = options.prompt + options.decoded * i / (points - 1);
    const double end = i == 0 || i + 1 == points ? 0.5 : 1.0;
    sum += end * step_milliseconds(decoder, batch, length, kSampledSteps);
  }
  const double seconds = sum / (points - 1) * options.decoded * 1e-3;
  return {{"batch", batch},
          {"decode_seconds", seconds},
          {"tokens_per_second", static_cast<double>(batch) * options.decoded / seconds},
          {"device_bytes", device_bytes(before)}};
}

int largest_batch(const DeviceModel& model, const EvictBenchOptions& options,
                  const ResolvedConfig* cache) {
  int fits = 0;
  for (int too_many = 2048; too_many - fits > 1;) {
    const int batch = fits + (too_many - fits) / 2;
    (CudaDecoder::fits(model, decoder_options(options, batch, cache)) ? fits : too_many) = batch;
  }
  if (fits == 0)
    throw std::runtime_error(
        "not even one sequence fits into the device's memory; use fewer --prompt-tokens or "
        "--max-new-tokens");
  return fits;
}

/// The runs of a cache at the requested and at the largest batch size.
struct Runs {
  Runs(const DeviceModel& model, const EvictBenchOptions& options, const ResolvedConfig* cache)
      : requested(run(model, options, options.batch, cache)),
        largest(run(model, options, largest_batch(model, options, cache), cache)) {}

  ordered_json requested, largest;
};

double ratio(const ordered_json& a, const ordered_json& b, const char* metric) {
  return a[metric].get<double>() / b[metric].get<double>();
}

/// Adds the runs of a configuration to its result.
void measure(ordered_json& result, const DeviceModel& model, const EvictBenchOptions& options,
             const CacheConfig& config, const Runs& full) {
  const ResolvedConfig cache = resolve(config, options.prompt + options.decoded);
  const Runs evicting(model, options, &cache);
  result.update({{"budget_tokens", cache.budget_tokens},
                 {"evicting", evicting.requested},
                 {"time_ratio", ratio(full.requested, evicting.requested, "decode_seconds")},
                 {"largest_evicting", evicting.largest},
                 {"throughput_ratio", ratio(evicting.largest, full.largest, "tokens_per_second")}});
}

}  // namespace

ordered_json bench_stream(const StreamBenchOptions& options) {
  const cuda::MemoryInfo before = cuda::memory_info();
  const DeviceModel model = bench_model(options.model);
  ordered_json metrics = bench_of("stream", model);
  metrics.update({{"policy", options.cache.policy.text()},
                  {"positions", name_of(options.cache.positions)},
                  {"weight_bytes", device_bytes(before)},
                  {"points", ordered_json::array()}});
  for (const std::uint32_t budget : options.budgets) {
    double step = 0;
    std::uint64_t taken = 0;  // memory taken from the driver, including the weights
    CacheConfig requested = options.cache;
    requested.budget = {.extent = tokens(budget)};
    const ResolvedConfig cache = resolve(requested, budget);
    {
      CudaDecoder decoder(model, {.sequences = 1, .prefill_tokens = 256, .caches = {cache}});
      step = step_milliseconds(decoder, 1, 2 * budget, options.steps);
      taken = device_bytes(before);
    }
    CudaDecoder window(
        model,
        {.sequences = 1, .slots = budget, .prefill_tokens = std::min<std::uint32_t>(budget, 2048)});
    const auto ids = bench_ids(budget, model.config().vocab);
    const double recompute = median_milliseconds(window.stream(), [&] {
      window.rewind(0, 0);
      window.prefill(0, ids);
      window.choose(1);
    });
    metrics["points"].push_back({{"budget", budget},
                                 {"step_milliseconds", step},
                                 {"tokens_per_second", 1e3 / step},
                                 {"recompute_milliseconds", recompute},
                                 {"ratio", recompute / step},
                                 {"device_bytes", taken}});
  }
  return metrics;
}

ordered_json bench_evict(const EvictBenchOptions& options) {
  ordered_json results = ordered_json::array();
  // Before the model is loaded, because budgets that need more than a length are refused here.
  for (const CacheConfig& config : options.configs)
    results.push_back(
        {{"policy", config.policy.text()},
         {"budget_tokens", config.budget_in_tokens(options.prompt + options.decoded, 0)}});
  const DeviceModel model = bench_model(options.model);
  const Runs full(model, options, nullptr);
  std::exception_ptr first;
  bool any = false;
  for (std::size_t i = 0; i < options.configs.size(); ++i) {
    try {
      measure(results[i], model, options, options.configs[i], full);
      any = true;
    } catch (const std::exception& error) {
      cuda::memory_info();  // throws if the device was lost, because no configuration can run then
      if (!first) first = std::current_exception();
      results[i]["refused"] = error.what();
    }
    if (options.progress) options.progress(results[i]);
  }
  if (first && !any) std::rethrow_exception(first);
  ordered_json metrics = bench_of("evict", model);
  metrics.update({{"prompt_tokens", options.prompt},
                  {"decoded_tokens", options.decoded},
                  {"full", full.requested},
                  {"largest_full", full.largest},
                  {"configurations", std::move(results)}});
  return metrics;
}

}  // namespace kvlab
