#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/bench.hpp"
#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/bench/limits.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr int kWarmUp = 4;  // steps

std::string hash_of_logits(const CudaDecoder& decoder, int rows) {
  std::vector<float> all;
  for (int row = 0; row < rows; ++row) {
    const std::vector<float> logits = decoder.logits(row);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return xxh3_hex(std::as_bytes(std::span(all)));
}

std::vector<PartTime> time_parts(CudaDecoder& decoder, int rows) {
  std::uint64_t live_bytes = 0;
  for (int row = 0; row < rows; ++row)
    live_bytes += decoder.model().cache_bytes(decoder.tokens(row) + 1);
  const DecodeStep step = decoder.decode_step(rows);
  std::vector<PartTime> times;
  for (const DecodeStep::Part& part : step.parts(live_bytes)) {
    const cuda::Graph graph(decoder.stream(), part.enqueue);
    times.push_back({.name = part.name,
                     .bytes = part.bytes,
                     .milliseconds = median_milliseconds(decoder.stream(),
                                                         [&] { graph.launch(decoder.stream()); })});
  }
  return times;
}

/// Tokens per second of sampling, with or without capture; what is still to be written counts.
double sampling_rate(const DeviceModel& model, const DecodeBenchOptions& options,
                     TraceWriter* writer) {
  const std::uint32_t count = options.steps + 1;
  CudaSequence sequence(model, {.tokens = options.context + count, .writer = writer});
  Sampler sampler({});
  const auto prompt = bench_ids(options.context, model.config().vocab);
  sequence.feed(prompt, SegmentKind::prompt);
  sequence.flush();  // the prompt is not what is measured
  const auto start = std::chrono::steady_clock::now();
  sequence.extend(sampler, count, [](std::int32_t) { return true; });
  sequence.flush();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return options.steps / took.count();
}

void time_capture(const DeviceModel& model, const DecodeBenchOptions& options,
                  DecodeBench& result) {
  sampling_rate(model, options, nullptr);  // warms up
  result.plain_tokens_per_second = sampling_rate(model, options, nullptr);
  TraceWriter writer(options.capture, cuda_trace_header(model, {{"random_weights", true}}));
  result.captured_tokens_per_second = sampling_rate(model, options, &writer);
  writer.finish();
}

}  // namespace

DecodeBench bench_decode(const DecodeBenchOptions& options) {
  const DeviceModel model = bench_model(options.model);
  DecodeBench result{.model = model.config().name,
                     .dtype = std::string(torch_name(model.dtype())),
                     .device = cuda::device_name()};
  result.read_bytes_per_second = cuda::read_bytes_per_second();
  if (!options.capture.empty()) time_capture(model, options, result);

  CudaDecoder decoder(model, {.sequences = options.batch,
                              .slots = options.context + options.steps + kWarmUp + 1,
                              .prefill_tokens = 128});
  const auto ids = bench_ids(static_cast<std::size_t>(options.batch), model.config().vocab);
  for (int row = 0; row < options.batch; ++row) {
    decoder.pretend(row, options.context);
    decoder.set_next(row, ids[static_cast<std::size_t>(row)]);
  }
  for (int i = 0; i < kWarmUp; ++i) decoder.step(options.batch);
  const std::uint64_t first = decoder.tokens(0) + 1, last = first + options.steps - 1;
  result.step_milliseconds = milliseconds_of(decoder.stream(),
                                             [&] {
                                               for (std::uint32_t i = 0; i < options.steps; ++i)
                                                 decoder.step(options.batch);
                                             }) /
                             options.steps;
  result.tokens_per_second = options.batch / (result.step_milliseconds * 1e-3);
  result.step_bytes = model.step_bytes() + static_cast<std::uint64_t>(options.batch) *
                                               model.cache_bytes((first + last) / 2);
  result.logits_xxh3 = hash_of_logits(decoder, options.batch);
  result.parts = time_parts(decoder, options.batch);
  return result;
}

PrefillBench bench_prefill(const PrefillBenchOptions& options) {
  const DeviceModel model = bench_model(options.model);
  const ModelConfig& config = model.config();
  PrefillBench result{.model = config.name,
                      .dtype = std::string(torch_name(model.dtype())),
                      .device = cuda::device_name()};
  result.matrix_flops_per_second = cuda::matrix_flops_per_second(model.type());
  CudaDecoder decoder(model, {.sequences = 1,
                              .slots = options.tokens,
                              .prefill_tokens = std::min(options.chunk, options.tokens)});
  const auto ids = bench_ids(options.tokens, config.vocab);
  result.milliseconds = median_milliseconds(decoder.stream(), [&] {
    decoder.rewind(0, 0);
    decoder.prefill(0, ids);
  });
  result.tokens_per_second = options.tokens / (result.milliseconds * 1e-3);
  double weights = 0;  // elements of one layer's matrices
  const DeviceLayer& layer = model.weights().layers.front();
  for (const DeviceMatrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
    weights += static_cast<double>(m->n) * m->k;
  const double tokens = options.tokens;
  const double attention = 2.0 * config.query_heads * config.head_size * tokens * (tokens + 1);
  result.flops =
      config.layers * (2.0 * weights * tokens + attention) + 2.0 * config.vocab * config.hidden;
  result.logits_xxh3 = hash_of_logits(decoder, 1);
  return result;
}

}  // namespace kvlab
