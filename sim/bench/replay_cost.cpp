#include "sim/bench/replay_cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "policies/catalogue.hpp"
#include "policies/columns/columns.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"
#include "traces/extras.hpp"

namespace kvlab {
namespace {

TraceHeader header_of(const SyntheticShape& shape) {
  TraceHeader header;
  header.model = "synthetic";
  header.shape = {shape.layers, shape.query_heads, shape.kv_heads, shape.head_size, Dtype::bf16};
  for (std::uint32_t i = 0; i < shape.head_size / 2; ++i)
    header.rope.inv_freq.push_back(static_cast<float>(std::pow(5e5, -2.0 * i / shape.head_size)));
  header.softmax_scale = 1 / std::sqrt(static_cast<float>(shape.head_size));
  header.rounding = Rounding::model_dtype;
  header.capture = nlohmann::json{{"engine", "synthetic"},
                                  {"version", "1"},
                                  {"device", "cpu"},
                                  {"options", nlohmann::json::object()}};
  return header;
}

/// Tokens [count, heads, dim]: noise, a topic of their own that drifts over some hundred tokens,
/// and along the dimension that rotates slowest the queries' pull at the heavy keys.
class Source {
 public:
  Source(std::uint32_t heads, std::uint32_t dim, bool keys, std::uint64_t seed)
      : heads_(heads), dim_(dim), keys_(keys), noise_(seed), topic_(heads * dim) {}

  std::vector<float> draw(std::uint32_t first, std::uint32_t count) {
    std::vector<float> all(std::size_t{count} * heads_ * dim_);
    std::normal_distribution<float> normal;
    for (std::uint32_t t = 0; t < count; ++t) {
      const float heavy = first + t == 0 ? 1.6f : noise_() % 12 == 0 ? 1.0f : 0.0f;
      for (std::size_t i = 0; i < topic_.size(); ++i) {
        topic_[i] = 0.99f * topic_[i] + 0.14f * normal(noise_);
        float x = 0.8f * normal(noise_) + 0.6f * topic_[i];
        if (i % dim_ == dim_ / 2 - 1) x += keys_ ? 4 * heavy : std::sqrt(float(dim_));
        all[std::size_t{t} * topic_.size() + i] = x;
      }
    }
    return all;
  }

 private:
  std::uint32_t heads_, dim_;
  bool keys_;
  std::mt19937 noise_;
  std::vector<float> topic_;
};

/// Uniform, quickly.
class Uniform {
 public:
  explicit Uniform(std::uint64_t seed) : engine_(static_cast<std::uint32_t>(seed)) {}
  float operator()() { return static_cast<float>(engine_() >> 8) * 0x1p-24f; }

 private:
  std::minstd_rand engine_;
};

OutputSketch sketch_of(const SyntheticShape& shape, Uniform& draw) {
  OutputSketch sketch{1, {}};
  sketch.values.resize(std::size_t{shape.layers} * shape.query_heads * shape.head_size *
                       kSketchColumns);
  for (float& x : sketch.values) x = (draw() - 0.5f) / 8;
  return sketch;
}

void add_columns(const std::filesystem::path& directory, Uniform& draw) {
  std::set<std::string> names;
  for (const PolicyEntry& entry : policy_catalogue())
    for (const std::string& name : parse_policy(entry.info.name).columns)
      if (!is_computed(name, false)) names.insert(name);
  for (const std::string& name : names)
    write_column(directory, name, [&](auto, auto, auto) { return draw(); });
}

constexpr int kBudgets = 8;

CacheConfig config_of(const std::string& policy, const std::string& budget,
                      std::optional<Positions> positions) {
  CacheConfig config;
  config.policy = parse_policy(policy, replay_references());
  config.budget = parse_budget(budget);
  config.positions = positions             ? *positions
                     : config.policy.entry ? config.policy.entry->info.positions
                                           : Positions::original;
  return config;
}

/// `count` shares of the trace from `least` to `most` percent, evenly.
BenchGrid grid_of(std::string name, const std::vector<std::string>& policies, int count,
                  double least, double most, std::optional<Positions> positions = std::nullopt) {
  BenchGrid grid{std::move(name), {}};
  for (const std::string& policy : policies)
    for (int i = 0; i < count; ++i) {
      grid.configs.push_back(config_of(
          policy, fmt::format("{:.4f}%", least + (most - least) * i / (count - 1)), positions));
      if (!grid.configs.back().evicts()) break;  // takes no budget
    }
  return grid;
}

std::vector<BenchGrid> all_grids() {
  constexpr int kNested = 64;
  std::vector<BenchGrid> grids{
      grid_of("grid", {"lru", "window", "h2o", "sink", "streaming_h2o"}, kBudgets, 5, 60),
      grid_of("unsqueezed", {"lru", "window", "h2o"}, kBudgets, 5, 60),
      grid_of("feedback", {"h2o", "lru"}, 20, 2, 60, Positions::original)};
  for (const char* policy : {"window", "sink", "random", "oracle_mass", "oracle_topk"})
    grids.push_back(
        grid_of(fmt::format("nested:{}", policy), {policy}, kNested, 1, 64, Positions::original));
  for (const char* policy : {"lru", "window", "h2o", "sink", "streaming_h2o"})
    grids.push_back(grid_of(policy, {policy}, kBudgets, 5, 60));
  return grids;
}

/// Live tokens attended by one KV head's cache.
double slot_steps(const TraceReader& trace, const CacheConfig& config) {
  const std::uint32_t budget = config.budget.resolve(trace.tokens(), trace.shape().head_size);
  double steps = 0;
  for (const Segment& segment : trace.segments())
    for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t)
      steps += segment.kind == SegmentKind::prompt ? t + 1 : std::min(t + 1, budget);
  return steps;
}

void keep_least(WorkTime& least, const WorkTime& time, bool first) {
  least.seconds = first ? time.seconds : std::min(least.seconds, time.seconds);
  least.cpu_seconds = first ? time.cpu_seconds : std::min(least.cpu_seconds, time.cpu_seconds);
}

/// One that is measured only where it is asked for.
std::optional<BenchGrid> further_grid(const std::string& name) {
  std::vector<std::string> policies;
  for (const PolicyEntry& entry : policy_catalogue())
    if (name == "shelf" || name == entry.info.name) policies.push_back(entry.info.name);
  if (policies.empty()) return std::nullopt;
  return grid_of(name, policies, kBudgets, 5, 60);
}

}  // namespace

TraceReader write_synthetic_trace(const std::filesystem::path& directory,
                                  const SyntheticShape& shape, std::uint64_t seed) {
  constexpr std::uint32_t kAtOnce = 256;
  TraceWriter writer(directory, header_of(shape));
  std::vector<Source> q, k, v;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    q.emplace_back(shape.query_heads, shape.head_size, false, seed + 3 * layer);
    k.emplace_back(shape.kv_heads, shape.head_size, true, seed + 3 * layer + 1);
    v.emplace_back(shape.kv_heads, shape.head_size, true, seed + 3 * layer + 2);
  }
  Uniform draw(seed + 1000);
  if (shape.draws) writer.sketch(sketch_of(shape, draw));
  const std::vector<float> norms(kAtOnce, 100.0f);
  for (std::uint32_t first = 0; first < shape.tokens;) {
    const bool prompt = first < shape.prompt_tokens;
    const std::uint32_t end = prompt ? shape.prompt_tokens : shape.tokens;
    const std::uint32_t count = std::min(kAtOnce, end - first);
    writer.begin(std::vector<std::int32_t>(count, 1),
                 prompt ? SegmentKind::prompt : SegmentKind::decode);
    const std::vector<float> out(std::size_t{count} * shape.query_heads * shape.head_size);
    std::vector<std::vector<float>> drawn(std::size_t{3} * shape.layers);
    parallel_for(drawn.size(), std::max(1u, std::thread::hardware_concurrency()),
                 [&](std::size_t i) {
                   Source& source = (i % 3 == 0 ? q : i % 3 == 1 ? k : v)[i / 3];
                   drawn[i] = source.draw(first, count);
                 });
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      writer.layer(layer, drawn[3 * layer], drawn[3 * layer + 1], drawn[3 * layer + 2], out, {});
      if (shape.draws) writer.residual(layer, std::span(norms).first(count));
    }
    writer.end();
    first += count;
  }
  writer.finish();
  add_columns(directory, draw);
  if (shape.draws) write_gradients(directory, shape.draws, [&] { return draw() - 0.5f; });
  return TraceReader::open(directory);
}

std::vector<std::string> bench_grid_names() {
  std::vector<std::string> names;
  for (const BenchGrid& grid : all_grids()) names.push_back(grid.name);
  return names;
}

std::vector<BenchGrid> bench_grids(const std::vector<std::string>& names) {
  std::vector<BenchGrid> grids = all_grids(), wanted;
  if (names.empty()) return grids;
  for (const std::string& name : names) {
    const auto found = std::find_if(grids.begin(), grids.end(),
                                    [&](const BenchGrid& grid) { return grid.name == name; });
    const auto further = found == grids.end() ? further_grid(name) : *found;
    if (!further)
      throw std::invalid_argument(
          fmt::format("--grid: '{}' should be a policy, shelf, or one of: {}", name,
                      fmt::join(bench_grid_names(), ", ")));
    wanted.push_back(*further);
  }
  return wanted;
}

ReplayCost measure_replay(const TraceReader& trace, const std::vector<BenchGrid>& grids,
                          ReplayOptions options, unsigned repeats, CudaReplayer* device) {
  options.elsewhere = device;
  const ModelShape& shape = trace.shape();
  ReplayCost bench;
  bench.bytes_read = static_cast<double>(trace.tokens()) * shape.layers *
                     (shape.query_heads + 2 * shape.kv_heads) * shape.head_size *
                     static_cast<double>(bytes_of(shape.dtype));
  for (const BenchGrid& grid : grids) {
    bench.grids.push_back({.name = grid.name, .configs = grid.configs.size()});
    for (const CacheConfig& config : grid.configs)
      bench.grids.back().slot_steps += slot_steps(trace, config) * shape.layers * shape.kv_heads;
  }
  if (device) {
    // Walks are compiled on demand, which is no part of a replay's time.
    ReplayOptions one_layer = options;
    one_layer.layers = {0};
    for (const BenchGrid& grid : grids) replay(trace, 0, grid.configs, one_layer);
  }
  for (unsigned repeat = 0; repeat < repeats; ++repeat)
    for (std::size_t g = 0; g < grids.size(); ++g) {
      const ExactPass exact =
          device ? device->exact_pass(trace, options.threads) : exact_pass(trace, options.threads);
      keep_least(bench.exact.time, exact.time, repeat == 0 && g == 0);
      bench.exact.flops = exact.flops;
      const double reading = device ? device->reading_seconds() : 0;
      WorkTime time = timed([&] { replay(trace, 0, grids[g].configs, options); });
      if (device) time.seconds -= device->reading_seconds() - reading;
      keep_least(bench.grids[g].time, time, repeat == 0);
      if (device)
        bench.grids[g].step_microseconds =
            1e6 * bench.grids[g].time.seconds / trace.tokens() / std::max(device->waves(), 1);
    }
  for (GridTime& grid : bench.grids) {
    grid.ratio = grid.time.seconds / bench.exact.time.seconds;
    grid.cpu_ratio = grid.time.cpu_seconds / bench.exact.time.cpu_seconds;
  }
  return bench;
}

}  // namespace kvlab
