#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/bench.hpp"
#include "engine/bench_limits.hpp"
#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr int kWarmUp = 4;  // steps

std::string hash_of_logits(const CudaDecoder& decoder, int rows) {
  std::vector<float> all;
  for (int row = 0; row < rows; ++row) {
    const std::vector<float> logits = decoder.logits(row);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return xxh3_hex(std::as_bytes(std::span(all)));
}

double rate(std::uint64_t bytes, double milliseconds) {
  return static_cast<double>(bytes) / (milliseconds * 1e-3);
}

ordered_json time_parts(CudaDecoder& decoder, int rows, ReadLimits& limits) {
  std::uint64_t live_bytes = 0;
  for (int row = 0; row < rows; ++row)
    live_bytes += decoder.model().cache_bytes(decoder.tokens(row) + 1);
  const DecodeStep step = decoder.decode_step(rows);
  ordered_json times = ordered_json::array();
  for (const DecodeStep::Part& part : step.parts(live_bytes)) {
    const cuda::Graph graph(decoder.stream(), part.enqueue);
    const double milliseconds =
        median_milliseconds(decoder.stream(), [&] { graph.launch(decoder.stream()); });
    times.push_back({{"name", part.name}, {"milliseconds", milliseconds}});
    if (part.bytes == 0) continue;
    times.back()["bytes"] = part.bytes;
    times.back()["bytes_per_second"] = rate(part.bytes, milliseconds);
    times.back()["share_of_read"] = limits.share("decode, " + part.name, part.bytes, milliseconds);
  }
  return times;
}

/// Tokens per second of sampling, with or without capture. The time includes writing the remaining
/// part of the trace.
double sampling_rate(const DeviceModel& model, const DecodeBenchOptions& options,
                     TraceWriter* writer) {
  const std::uint32_t count = options.steps + 1;
  CudaSequence sequence(model, {.tokens = options.context + count, .writer = writer});
  Sampler sampler({});
  const auto prompt = bench_ids(options.context, model.config().vocab);
  sequence.feed(prompt, SegmentKind::prompt);
  sequence.flush();  // excludes the prompt from the measurement
  const auto start = std::chrono::steady_clock::now();
  sequence.extend(sampler, count, [](std::int32_t) { return true; });
  sequence.flush();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return options.steps / took.count();
}

ordered_json time_capture(const DeviceModel& model, const DecodeBenchOptions& options) {
  sampling_rate(model, options, nullptr);  // a warm-up run
  const double plain = sampling_rate(model, options, nullptr);
  TraceWriter writer(options.capture, cuda_trace_header(model, {{"random_weights", true}}));
  const double captured = sampling_rate(model, options, &writer);
  writer.finish();
  return {{"tokens_per_second_without", plain}, {"tokens_per_second_with", captured}};
}

/// Floating-point operations of attention. For each query head and each token that it sees, there
/// are two products of head_size multiplications and additions: with the key and with the value.
double attention_flops(const ModelConfig& config, const PrefillBenchOptions& options) {
  const bool evicts = options.cache.evicts();
  double pairs = 0;
  for (const RowSpec& row : config.rows)
    pairs += attended_pairs(options.tokens, row.window, evicts ? options.cache.prefill.chunk : 0,
                            evicts && row.window == 0 ? options.cache.budget_tokens : 0);
  return 4.0 * config.query_heads * config.head_size * pairs;
}

}  // namespace

ordered_json bench_decode(const DecodeBenchOptions& options) {
  const DeviceModel model = bench_model(options.model);
  ReadLimits limits;
  ordered_json capture;
  if (!options.capture.empty()) capture = time_capture(model, options);

  CudaDecoder decoder(model, {.sequences = options.batch,
                              .slots = options.context + options.steps + kWarmUp + 1,
                              .prefill_tokens = 128});
  const auto ids = bench_ids(static_cast<std::size_t>(options.batch), model.config().vocab);
  decoder.pretend(options.context);
  for (int row = 0; row < options.batch; ++row)
    decoder.set_next(row, ids[static_cast<std::size_t>(row)]);
  for (int i = 0; i < kWarmUp; ++i) decoder.step(options.batch);
  const std::uint64_t first = decoder.tokens(0) + 1, last = first + options.steps - 1;
  const auto steps = [&] {
    for (std::uint32_t i = 0; i < options.steps; ++i) decoder.step(options.batch);
  };
  const double step = milliseconds_of(decoder.stream(), steps) / options.steps;
  const std::uint64_t step_bytes = model.step_bytes() + static_cast<std::uint64_t>(options.batch) *
                                                            model.cache_bytes((first + last) / 2);
  const std::string logits = hash_of_logits(decoder, options.batch);
  ordered_json metrics = bench_of("decode", model);
  metrics.update({{"batch", options.batch},
                  {"context", options.context},
                  {"steps", options.steps},
                  {"tokens_per_second", options.batch / (step * 1e-3)},
                  {"step_milliseconds", step},
                  {"step_bytes", step_bytes},
                  {"step_bytes_per_second", rate(step_bytes, step)},
                  {"read_bytes_per_second", limits.memory()},
                  {"limit_bytes_per_second", limits.limit(step_bytes)},
                  {"share_of_read", limits.share("decode, a step", step_bytes, step)},
                  {"parts", time_parts(decoder, options.batch, limits)},
                  {"logits_xxh3", logits}});
  if (!capture.is_null()) metrics["capture"] = std::move(capture);
  return metrics;
}

ordered_json bench_prefill(const PrefillBenchOptions& options) {
  const DeviceModel model = bench_model(options.model);
  const ModelConfig& config = model.config();
  const double matrix_rate = matrix_flops_per_second(model.type());
  // A cache that evicts cannot be reset to an earlier state, so each repetition needs its own
  // sequence.
  constexpr int repeats = 5;
  const int sequences = options.cache.evicts() ? repeats + 1 : 1;
  CudaDecoderOptions how{.sequences = sequences,
                         .slots = options.tokens,
                         .prefill_tokens = std::min(options.chunk, options.tokens)};
  if (options.cache.evicts()) how.caches.assign(static_cast<std::size_t>(sequences), options.cache);
  CudaDecoder decoder(model, std::move(how));
  const auto ids = bench_ids(options.tokens, config.vocab);
  int next = 0;
  const auto prefill = [&] {
    if (!decoder.evicts()) decoder.rewind(0, 0);
    decoder.prefill(next++ % sequences, ids);
  };
  const double milliseconds = median_milliseconds(decoder.stream(), prefill, repeats);
  double weights = 0;  // number of elements of one layer's matrices; in layers with experts, only
                       // the chosen experts count
  const DeviceLayer& layer = model.weights().layers.front();
  for (const DeviceMatrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
    weights += static_cast<double>(m->n) * m->k * (m->experts > 0 ? config.experts.chosen : 1);
  const double tokens = options.tokens;
  const double flops = config.layers * 2.0 * weights * tokens + attention_flops(config, options) +
                       2.0 * config.vocab * config.hidden;
  const double flops_rate = flops / (milliseconds * 1e-3);
  ordered_json metrics = bench_of("prefill", model);
  metrics.update({{"policy", options.cache.policy.text()},
                  {"tokens", options.tokens},
                  {"chunk", options.chunk},
                  {"milliseconds", milliseconds},
                  {"tokens_per_second", options.tokens / (milliseconds * 1e-3)},
                  {"flops", flops},
                  {"flops_per_second", flops_rate},
                  {"matrix_flops_per_second", matrix_rate},
                  {"share_of_matrix", share_of_limit("prefill", flops_rate, matrix_rate, "FLOP/s")},
                  {"logits_xxh3", hash_of_logits(decoder, 1)}});
  return metrics;
}

}  // namespace kvlab
