#include "sim/bench/replay_cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace kvlab {
namespace {

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
