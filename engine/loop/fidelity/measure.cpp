#include "engine/loop/fidelity/measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "policies/columns/columns.hpp"
#include "sim/run/results.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

TraceReader capture(Backend& backend, const LoopText& text, const OpenLoopOptions& options) {
  TraceWriter writer(options.capture, backend.trace_header({{"teacher_forced", true}}));
  writer.sketch(options.sketch);
  const auto decoder = backend.capturing_decoder(
      ResolvedConfig{}, static_cast<std::uint32_t>(text.ids.size()), writer, {});
  const std::span all(text.ids);
  decoder->feed(all.first(text.prompt_tokens), SegmentKind::prompt);
  decoder->feed(all.subspan(text.prompt_tokens), SegmentKind::decode);
  decoder->flush();
  writer.finish();
  return TraceReader::open(options.capture);
}

}  // namespace

LoopText text_of_trace(const std::filesystem::path& directory, const std::string& weights_xxh3,
                       unsigned threads) {
  TraceReader trace = open_verified_trace(directory, threads);
  const std::string where = directory.string();
  if (trace.header().weights_xxh3 != weights_xxh3)
    throw std::runtime_error(
        fmt::format("--trace {}: was captured from other weights ({}) than --model's ({})", where,
                    trace.header().weights_xxh3.empty() ? "unknown" : trace.header().weights_xxh3,
                    weights_xxh3));
  const auto& segments = trace.segments();
  if (segments.size() != 2 || segments[0].kind != SegmentKind::prompt || segments[1].tokens < 2)
    throw std::runtime_error(fmt::format(
        "--trace {}: should hold one prompt and then decoded tokens, two at least", where));
  LoopText text{.name = last_name(where),
                .ids = trace.ids(),
                .prompt_tokens = segments[0].tokens,
                .trace = {}};
  text.trace = std::move(trace);
  return text;
}

OpenLoopFigures run_open_loop(Backend& backend, const LoopText& text,
                              std::span<const CacheConfig> configs,
                              const OpenLoopOptions& options) {
  std::optional<TraceReader> captured;
  if (!text.trace) captured = capture(backend, text, options);
  const bool wants_output = std::ranges::any_of(
      configs, [](const CacheConfig& config) { return wants_projections(config.policy.columns); });
  const ReplayResult replayed =
      replay(captured ? *captured : *text.trace, 0, configs,
             {.every_output_error = options.every_output_error,
              .elsewhere = options.device,
              .output = wants_output ? backend.output_projections() : nullptr,
              .threads = options.threads,
              .layers = {},
              .progress = options.progress});
  OpenLoopFigures figures;
  for (const Measurement& row : replayed.measurements) {
    if (row.layer >= 0) continue;
    if (const MetricInfo* const metric = find_metric(row.metric); !metric || !metric->ranks)
      continue;
    const std::vector<double> none(configs.size(), std::numeric_limits<double>::quiet_NaN());
    figures.try_emplace(row.metric, none).first->second[row.config] = row.value;
  }
  return figures;
}

std::vector<std::vector<double>> closed_loop_kl(const Sweep& sweep, const LoopText& text,
                                                std::span<const CacheConfig> configs,
                                                unsigned threads,
                                                std::function<void(double)> progress) {
  std::vector<CacheConfig> with_full{CacheConfig{}};
  with_full.insert(with_full.end(), configs.begin(), configs.end());
  auto scores = sweep(
      {text.ids}, with_full,
      {.prompt_tokens = text.prompt_tokens, .threads = threads, .progress = std::move(progress)});
  std::vector<std::vector<double>> kl;
  for (std::size_t c = 0; c < configs.size(); ++c) kl.push_back(std::move(scores[0][c + 1].kl));
  return kl;
}

}  // namespace kvlab
