#include "engine/loop/fidelity/measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "policies/columns/columns.hpp"
#include "sim/run/results.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/work_time.hpp"

namespace kvlab {
namespace {

TraceReader capture(Backend& backend, const LoopText& text, const OpenLoopOptions& options) {
  TraceWriter writer(options.capture, backend.trace_header({{"teacher_forced", true}}));
  writer.sketch(options.sketch);
  const auto decoder = backend.capturing_decoder(
      ResolvedConfig{}, static_cast<std::uint32_t>(text.ids.size()), writer,
      [&](std::uint32_t tokens) {
        if (options.capturing)
          options.capturing(static_cast<double>(tokens) / static_cast<double>(text.ids.size()));
      });
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
  LoopText text{.name = last_name(where), .ids = trace.ids(), .prompt_tokens = segments[0].tokens};
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
              .progress = options.progress});
  OpenLoopFigures figures;
  for (const Measurement& row : replayed.measurements) {
    if (row.layer >= 0) continue;
    const MetricInfo* const metric = find_metric(row.metric);
    if (!metric || !(metric->ranks || row.metric.starts_with("kv_bytes_"))) continue;
    const std::vector<double> none(configs.size(), std::numeric_limits<double>::quiet_NaN());
    figures.try_emplace(row.metric, none).first->second[row.config] = row.value;
  }
  return figures;
}

std::vector<LoopScores> closed_loop_scores(const Sweep& sweep, const LoopText& text,
                                           std::span<const CacheConfig> configs, unsigned threads,
                                           std::function<void(double)> progress) {
  std::vector<CacheConfig> with_full{CacheConfig{}};
  with_full.insert(with_full.end(), configs.begin(), configs.end());
  return std::move(sweep({text.ids}, with_full,
                         {.prompt_tokens = text.prompt_tokens,
                          .threads = threads,
                          .progress = std::move(progress)})[0]);
}

std::vector<std::vector<double>> kl_of(std::vector<LoopScores> scores) {
  std::vector<std::vector<double>> kl;
  for (std::size_t c = 1; c < scores.size(); ++c) kl.push_back(std::move(scores[c].kl));
  return kl;
}

double closed_loop_rate(const Sweep& sweep, const LoopText& text, unsigned threads) {
  constexpr std::size_t kTokens = 192;
  LoopText beginning{.name = text.name, .ids = text.ids, .prompt_tokens = 1};
  beginning.ids.resize(std::min(kTokens, beginning.ids.size()));
  const WorkTime took = timed([&] { closed_loop_scores(sweep, beginning, {}, threads, {}); });
  return took.seconds / static_cast<double>(beginning.ids.size());
}

}  // namespace kvlab
