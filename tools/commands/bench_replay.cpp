#include "tools/commands/bench_replay.hpp"

#include <fmt/format.h>

#include <optional>

#include "sim/bench/replay_cost.hpp"
#include "sim/bench/synthetic_trace.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = 1 << 20, kMostHeads = 1024, kMostRepeats = 1000;

/// A synthetic trace for as long as it is measured.
class TemporaryTrace {
 public:
  explicit TemporaryTrace(const SyntheticShape& shape)
      : trace_(write_synthetic_trace(folder_ / "trace", shape, 1)) {}
  const TraceReader& trace() const { return trace_; }

 private:
  TemporaryFolder folder_;
  TraceReader trace_;
};

SyntheticShape shape_from(const po::variables_map& options) {
  SyntheticShape shape;
  shape.layers = count_from(options, "synthetic-layers", 1, kMostHeads);
  shape.query_heads = count_from(options, "synthetic-query-heads", 1, kMostHeads);
  shape.kv_heads = count_from(options, "synthetic-kv-heads", 1, kMostHeads);
  shape.head_size = count_from(options, "synthetic-head-size", 1, kMostHeads);
  shape.tokens = count_from(options, "tokens", 1, kMostTokens);
  shape.prompt_tokens = std::max(1u, shape.tokens / 8);
  shape.draws = count_from(options, "synthetic-draws", 0, kMaxDraws);
  if (shape.query_heads % shape.kv_heads != 0 || shape.head_size % 2 != 0 || shape.tokens < 2)
    throw std::invalid_argument(
        "--synthetic-query-heads should be a multiple of --synthetic-kv-heads, "
        "--synthetic-head-size even, --tokens at least 2");
  return shape;
}

ordered_json to_json(const ReplayCost& bench, const TraceReader& trace, unsigned threads,
                     bool on_device) {
  const ModelShape& shape = trace.shape();
  ordered_json grids = ordered_json::array();
  ordered_json json{{"bench", "replay"},
                    {"tokens", trace.tokens()},
                    {"layers", shape.layers},
                    {"query_heads", shape.query_heads},
                    {"kv_heads", shape.kv_heads},
                    {"head_size", shape.head_size},
                    {"threads", threads},
                    {"device", on_device ? "cuda" : "cpu"},
                    {"bytes_read", bench.bytes_read},
                    {"exact_seconds", bench.exact.time.seconds},
                    {"exact_cpu_seconds", bench.exact.time.cpu_seconds},
                    {"exact_flops_per_second", bench.exact.flops / bench.exact.time.seconds}};
  for (const GridTime& grid : bench.grids) {
    grids.push_back({{"name", grid.name},
                     {"configurations", grid.configs},
                     {"seconds", grid.time.seconds},
                     {"cpu_seconds", grid.time.cpu_seconds},
                     {"ratio", grid.ratio},
                     {"cpu_ratio", grid.cpu_ratio},
                     {"slots_per_second", grid.slot_steps_per_second()}});
    if (grid.step_microseconds > 0)
      grids.back()["microseconds_per_step_and_wave"] = grid.step_microseconds;
    if (grid.name == "grid") {
      json["ratio_to_attention"] = grid.ratio;
      json["cpu_ratio_to_attention"] = grid.cpu_ratio;
    }
  }
  json["grids"] = std::move(grids);
  return json;
}

}  // namespace

void add_bench_replay_options(po::options_description& options) {
  auto add = options.add_options();
  add("trace", text_option("TRACE"),
      "replay: of this trace; default: a synthetic one of the shape of Llama-3.1-8B");
  add("grid", text_option("NAMES"),
      "replay: which of the grids that it prints (default: all); also `shelf`, every policy, and "
      "any policy's name");
  add("repeats", number_option("N", 3),
      "replay: how often, in turns with the exact pass; the least times count");
  add("synthetic-layers", number_option("N", 4),
      "replay: layers of the synthetic trace; it has --tokens tokens, an eighth of them a prompt");
  add("synthetic-query-heads", number_option("N", 32), "replay: its query heads");
  add("synthetic-kv-heads", number_option("N", 8), "replay: its KV heads");
  add("synthetic-head-size", number_option("N", 128), "replay: its head size");
  add("synthetic-draws", number_option("N", 0),
      "replay: its draws of gradients; with any, it has residual norms and a sketch too");
}

ordered_json bench_replay(const po::variables_map& options) {
  const auto device =
      options.count("device") && device_from(options) == Device::cuda ? cuda_replayer() : nullptr;
  const auto grids = bench_grids(list_from(options, "grid"));
  const auto repeats = count_from(options, "repeats", 1, kMostRepeats);
  ReplayOptions how;
  how.threads = threads_from(options);
  std::optional<TemporaryTrace> synthetic;
  std::optional<TraceReader> given;
  if (options.count("trace"))
    given = TraceReader::open(options["trace"].as<std::string>());
  else
    synthetic.emplace(shape_from(options));
  const TraceReader& trace = given ? *given : synthetic->trace();
  const ReplayCost bench = measure_replay(trace, grids, how, repeats, device.get());
  return to_json(bench, trace, how.threads, device != nullptr);
}

}  // namespace kvlab
