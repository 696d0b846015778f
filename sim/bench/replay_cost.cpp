#include "sim/bench/replay_cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "policies/catalogue.hpp"
#include "policies/features/features.hpp"
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

/// Random queries or keys [count, heads, dim]. A vector is the sum of noise and of a topic that
/// drifts over some hundred tokens. In the dimension that RoPE rotates slowest, all queries and the
/// keys of heavy tokens also have a large positive value, so that every query gives heavy tokens
/// much attention.
class Source {
 public:
  Source(std::uint32_t heads, std::uint32_t dim, bool keys, std::uint64_t seed)
      : heads_(heads), dim_(dim), keys_(keys), noise_(seed), topic_(heads * dim) {}

  std::vector<float> sample(std::uint32_t first, std::uint32_t count) {
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

/// A fast uniform generator.
class Uniform {
 public:
  explicit Uniform(std::uint64_t seed) : engine_(static_cast<std::uint32_t>(seed)) {}
  float operator()() { return static_cast<float>(engine_() >> 8) * 0x1p-24f; }

 private:
  std::minstd_rand engine_;
};

OutputSketch sketch_of(const SyntheticShape& shape, Uniform& sample) {
  OutputSketch sketch{1, {}};
  sketch.values.resize(std::size_t{shape.layers} * shape.query_heads * shape.head_size *
                       kSketchColumns);
  for (float& x : sketch.values) x = (sample() - 0.5f) / 8;
  return sketch;
}

void add_features(const std::filesystem::path& directory, Uniform& sample) {
  std::set<std::string> names;
  for (const PolicyEntry& entry : policy_catalogue())
    for (const std::string& name : parse_policy(entry.info.name).features)
      if (!is_computed(name, false)) names.insert(name);
  for (const std::string& name : names)
    write_feature(directory, name, [&](auto, auto, auto) { return sample(); });
}

constexpr int kBudgets = 8;

CacheConfig config_of(const std::string& policy, const std::string& budget,
                      std::optional<Positions> positions) {
  CacheConfig config;
  config.policy = parse_policy(policy, replay_oracles());
  config.budget = parse_budget(budget);
  config.positions = positions             ? *positions
                     : config.policy.entry ? config.policy.entry->info.positions
                                           : Positions::original;
  return config;
}

/// A sweep of `policies` with `count` budgets each, evenly spaced from `min_share` to `max_share`
/// percent of the trace.
BenchSweep sweep_of(std::string name, const std::vector<std::string>& policies, int count,
                    double min_share, double max_share,
                    std::optional<Positions> positions = std::nullopt) {
  BenchSweep sweep{std::move(name), {}};
  for (const std::string& policy : policies)
    for (int i = 0; i < count; ++i) {
      sweep.configs.push_back(config_of(
          policy, fmt::format("{:.4f}%", min_share + (max_share - min_share) * i / (count - 1)),
          positions));
      if (!sweep.configs.back().evicts()) break;  // this policy has no budget
    }
  return sweep;
}

std::vector<BenchSweep> all_sweeps() {
  constexpr int kManyBudgets = 64;
  std::vector<BenchSweep> sweeps{
      sweep_of("sweep", {"lru", "window", "h2o", "sink", "streaming_h2o"}, kBudgets, 5, 60),
      sweep_of("original_positions", {"lru", "window", "h2o"}, kBudgets, 5, 60),
      sweep_of("feedback", {"h2o", "lru"}, 20, 2, 60, Positions::original)};
  for (const char* policy : {"window", "sink", "random", "oracle_attention", "oracle_topk"})
    sweeps.push_back(
        sweep_of(fmt::format("{}_64", policy), {policy}, kManyBudgets, 1, 64, Positions::original));
  for (const char* policy : {"lru", "window", "h2o", "sink", "streaming_h2o"})
    sweeps.push_back(sweep_of(policy, {policy}, kBudgets, 5, 60));
  return sweeps;
}

/// Number of live tokens to which a query of one KV head attends, summed over the queries.
double slot_steps(const TraceReader& trace, const CacheConfig& config) {
  const std::uint32_t budget = config.budget.resolve(trace.tokens(), trace.shape().head_size);
  double steps = 0;
  for (const Segment& segment : trace.segments())
    for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t)
      steps += segment.kind == SegmentKind::prompt ? t + 1 : std::min(t + 1, budget);
  return steps;
}

void keep_shortest(WorkTime& shortest, const WorkTime& time, bool first) {
  shortest.seconds = first ? time.seconds : std::min(shortest.seconds, time.seconds);
  shortest.cpu_seconds =
      first ? time.cpu_seconds : std::min(shortest.cpu_seconds, time.cpu_seconds);
}

/// A sweep that is measured only if the user names it; see bench_sweeps().
std::optional<BenchSweep> further_sweep(const std::string& name) {
  std::vector<std::string> policies;
  for (const PolicyEntry& entry : policy_catalogue())
    if (name == "shelf" || name == entry.info.name) policies.push_back(entry.info.name);
  if (policies.empty()) return std::nullopt;
  return sweep_of(name, policies, kBudgets, 5, 60);
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
  Uniform sample(seed + 1000);
  if (shape.gradient_samples) writer.sketch(sketch_of(shape, sample));
  const std::vector<float> norms(kAtOnce, 100.0f);
  for (std::uint32_t first = 0; first < shape.tokens;) {
    const bool prompt = first < shape.prompt_tokens;
    const std::uint32_t end = prompt ? shape.prompt_tokens : shape.tokens;
    const std::uint32_t count = std::min(kAtOnce, end - first);
    writer.begin(std::vector<std::int32_t>(count, 1),
                 prompt ? SegmentKind::prompt : SegmentKind::decode);
    const std::vector<float> out(std::size_t{count} * shape.query_heads * shape.head_size);
    std::vector<std::vector<float>> tensors(std::size_t{3} * shape.layers);
    parallel_for(tensors.size(), std::max(1u, std::thread::hardware_concurrency()),
                 [&](std::size_t i) {
                   Source& source = (i % 3 == 0 ? q : i % 3 == 1 ? k : v)[i / 3];
                   tensors[i] = source.sample(first, count);
                 });
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      writer.layer(layer, tensors[3 * layer], tensors[3 * layer + 1], tensors[3 * layer + 2], out,
                   {});
      if (shape.gradient_samples) writer.residual(layer, std::span(norms).first(count));
    }
    writer.end();
    first += count;
  }
  writer.finish();
  add_features(directory, sample);
  if (shape.gradient_samples)
    write_gradients(directory, shape.gradient_samples, [&] { return sample() - 0.5f; });
  return TraceReader::open(directory);
}

std::vector<std::string> bench_sweep_names() {
  std::vector<std::string> names;
  for (const BenchSweep& sweep : all_sweeps()) names.push_back(sweep.name);
  return names;
}

std::vector<BenchSweep> bench_sweeps(const std::vector<std::string>& names) {
  std::vector<BenchSweep> sweeps = all_sweeps(), wanted;
  if (names.empty()) return sweeps;
  for (const std::string& name : names) {
    const auto found = std::find_if(sweeps.begin(), sweeps.end(),
                                    [&](const BenchSweep& sweep) { return sweep.name == name; });
    const auto further = found == sweeps.end() ? further_sweep(name) : *found;
    if (!further)
      throw std::invalid_argument(
          fmt::format("--sweep: '{}' should be a policy, shelf, or one of: {}", name,
                      fmt::join(bench_sweep_names(), ", ")));
    wanted.push_back(*further);
  }
  return wanted;
}

ReplayCost measure_replay(const TraceReader& trace, const std::vector<BenchSweep>& sweeps,
                          ReplayOptions options, unsigned repeats, CudaReplayer* device) {
  options.elsewhere = device;
  const ModelShape& shape = trace.shape();
  ReplayCost bench;
  bench.bytes_read = static_cast<double>(trace.tokens()) * shape.layers *
                     (shape.query_heads + 2 * shape.kv_heads) * shape.head_size *
                     static_cast<double>(bytes_of(shape.dtype));
  for (const BenchSweep& sweep : sweeps) {
    bench.sweeps.push_back({.name = sweep.name, .configs = sweep.configs.size()});
    for (const CacheConfig& config : sweep.configs)
      bench.sweeps.back().slot_steps += slot_steps(trace, config) * shape.layers * shape.kv_heads;
  }
  if (device) {
    // Compiles the walks first, because their compilation does not belong to a replay's time.
    ReplayOptions one_layer = options;
    one_layer.layers.assign(1, 0);
    for (const BenchSweep& sweep : sweeps) replay(trace, 0, sweep.configs, one_layer);
  }
  for (unsigned repeat = 0; repeat < repeats; ++repeat)
    for (std::size_t g = 0; g < sweeps.size(); ++g) {
      const ExactPass exact =
          device ? device->exact_pass(trace, options.threads) : exact_pass(trace, options.threads);
      keep_shortest(bench.exact.time, exact.time, repeat == 0 && g == 0);
      bench.exact.flops = exact.flops;
      const double reading = device ? device->reading_seconds() : 0;
      WorkTime time = measure_time([&] { replay(trace, 0, sweeps[g].configs, options); });
      if (device) time.seconds -= device->reading_seconds() - reading;
      keep_shortest(bench.sweeps[g].time, time, repeat == 0);
      if (device)
        bench.sweeps[g].step_microseconds =
            1e6 * bench.sweeps[g].time.seconds / trace.tokens() / std::max(device->waves(), 1);
    }
  for (SweepTime& sweep : bench.sweeps) {
    sweep.ratio = sweep.time.seconds / bench.exact.time.seconds;
    sweep.cpu_ratio = sweep.time.cpu_seconds / bench.exact.time.cpu_seconds;
  }
  return bench;
}

}  // namespace kvlab
