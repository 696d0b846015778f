#include "sim/device/cuda_replay.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "kernels/host/transfer.hpp"
#include "kernels/launch_plans.hpp"
#include "policies/executor.hpp"
#include "sim/device/batch.hpp"

namespace kvlab {
namespace {

/// If some caches evict by layer, extends `tasks` to all head tasks of their layers.
std::vector<HeadTask> whole_layers(const ReplayPlan& plan, std::span<const HeadTask> tasks) {
  std::vector<HeadTask> all(tasks.begin(), tasks.end());
  if (std::ranges::none_of(plan.configs, &ResolvedConfig::evicts_by_layer)) return all;
  all.clear();
  std::set<std::uint32_t> layers;
  for (const HeadTask& task : tasks)
    if (layers.insert(task.layer).second)
      for (std::uint32_t head = 0; head < plan.trace.shape().kv_heads; ++head)
        all.push_back({task.layer, head});
  return all;
}

/// Whether the device supports the attention of all layers, that is, no layer has soft caps or sink
/// logits.
bool knows_rows(const TraceReader& trace) {
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
    const RowSpec& row = trace.row(layer);
    if (row.softcap > 0 || !row.sinks.empty()) return false;
  }
  return true;
}

/// Head tasks, grouped by RoPE table and softmax scale. All head tasks of a batch are in one such
/// group.
using Alike = std::map<std::pair<std::uint32_t, float>, std::vector<HeadTask>>;

Alike alike(const TraceReader& trace, std::span<const HeadTask> tasks) {
  Alike groups;
  for (const HeadTask& task : tasks)
    groups[{trace.row(task.layer).table, trace.row(task.layer).scale}].push_back(task);
  return groups;
}

std::size_t index_of(const HeadTask& task, const std::vector<HeadTask>& all) {
  const auto same = [&](const HeadTask& other) {
    return other.layer == task.layer && other.kv_head == task.kv_head;
  };
  return static_cast<std::size_t>(std::ranges::find_if(all, same) - all.begin());
}

class Replayer final : public CudaReplayer {
 public:
  explicit Replayer(KeptWatcher watcher) : watcher_(std::move(watcher)) {}

  bool takes(const TraceReader& trace, const CacheConfig& config) const override {
    const ModelShape& shape = trace.shape();
    const PolicyEntry* const entry = config.policy.entry.get();
    return refusal(kCudaReplay, config).empty() && kernels::has_text(*entry) &&
           shape.group() <= kernels::kMaxReplayGroup &&
           shape.head_size <= kernels::kMaxReplayHeadSize && shape.head_size % 8 == 0 &&
           trace.row(0).rope.rotated_dims() % 4 == 0 && knows_rows(trace) &&
           (!config.policy.tier_plan.is_quantized() || shape.head_size % kQuantBlock == 0) &&
           (config.policy.modifiers.scope == Modifiers::Scope::head || walks_layers(shape)) &&
           fits(trace, config);
  }

  double reading_seconds() const override { return reading_; }

  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                            std::span<const HeadTask> tasks) override {
    std::vector<std::vector<HeadOutcome>> all, requested;
    const std::vector<HeadTask> wanted = whole_layers(plan, tasks);
    std::vector<HeadTask> whole;
    const auto watch = [&](std::size_t task, std::size_t config, std::uint32_t query, auto live) {
      watcher_(index_of(whole[task], wanted), config, query, live);
    };
    for (const auto& [key, group] : alike(plan.trace, wanted)) {
      const std::size_t before = whole.size();
      whole.insert(whole.end(), group.begin(), group.end());
      for_each_batch(plan, group, [&](Batch& batch, std::size_t first) {
        if (watcher_) batch.keep_sets();
        batch.replay(walks_);
        if (watcher_) batch.show_sets(before + first, watch);
        waves_ = batch.tasks().waves(walks_);
        for (auto& outcomes : batch.outcomes()) all.push_back(std::move(outcomes));
      });
    }
    for (const HeadTask& task : tasks) requested.push_back(std::move(all[index_of(task, whole)]));
    return requested;
  }

  int waves() const override { return waves_; }

  ExactPass exact_pass(const TraceReader& trace, unsigned threads) override {
    const LayerRopes ropes(trace);
    const std::vector<HeadArithmetic> arithmetics(trace.shape().layers, arithmetic_of(trace, 0, 0));
    const MeasuredQueries measured(trace.segments(), Queries::all, 1);
    const ReplayPlan plan{trace, 0, ropes, arithmetics, measured, threads, {}, nullptr};
    std::vector<HeadTask> tasks;
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head)
        tasks.push_back({layer, kv_head});
    ExactPass pass;
    for_each_batch(plan, tasks, [&](Batch& batch, std::size_t) {
      batch.attend();  // warm-up, in which the library chooses its algorithms
      const WorkTime time = measure_time([&] { pass.flops += batch.attend(); });
      pass.time.seconds += time.seconds;
      pass.time.cpu_seconds += time.cpu_seconds;
    });
    return pass;
  }

 private:
  /// Whether the buffers for a text of this length fit into the shared memory of the device. If
  /// they do not, the CPU replays the configuration.
  static bool fits(const TraceReader& trace, const CacheConfig& config) {
    using kernels::ReplayTokens;
    const kernels::ReplayShape shape{.tokens = static_cast<int>(trace.tokens()),
                                     .group = static_cast<int>(trace.shape().group()),
                                     .head_size = static_cast<int>(trace.shape().head_size)};
    const auto tiers = static_cast<int>(config.policy.tier_plan.tiers.size());
    const bool cache_positions = config.positions == Positions::cache;
    kernels::DeviceLimits limits;
    cuda::check(kernels::device_limits(limits), "querying the device's limits");
    return kernels::replay_outputs_plan(KVLAB_F32, limits).fits() &&
           kernels::walk_fits(shape,
                              cache_positions ? ReplayTokens::cache_positions
                              : tiers > 0     ? ReplayTokens::tiered
                                              : ReplayTokens::exact,
                              tiers, limits);
  }
  /// Divides `tasks` into batches that are as large as memory allows, and calls work(batch, index
  /// of its first head task) for each. All layers of `tasks` must have the same RoPE table and
  /// softmax scale.
  template <class Work>
  void for_each_batch(const ReplayPlan& plan, std::span<const HeadTask> tasks, Work work) {
    const std::uint32_t layer = tasks.front().layer;
    const HeadTaskPlan common{
        plan.trace.shape(), plan.trace.row(layer).rope, plan.ropes[layer], plan.arithmetics[layer],
        plan.measured,      plan.trace.tokens(),        plan.sequence};
    const ProjectionColumns columns = projection_columns(plan.trace, plan.measured.which());
    const DeviceSweep sweep(plan.configs, common.tokens, !plan.measured.passages().empty(),
                            columns.residual > 0);
    const Tables tables(common);
    HeadTaskSizes sizes = sizes_of(common, sweep, sweep.configs);
    sizes.columns = columns;
    const std::size_t landing = sizes.land_at_once(tasks.size(), plan.threads) * sizes.landing(),
                      batch_tasks = std::min(
                          tasks_at_once(sizes, landing, sweep.by_layer ? common.shape.kv_heads : 1),
                          tasks.size());
    for (std::size_t first = 0; first < tasks.size(); first += batch_tasks) {
      Batch batch(plan, common, sweep, sizes,
                  tasks.subspan(first, std::min(batch_tasks, tasks.size() - first)), tables,
                  product_, streams_);
      walks_.load(batch.tasks().walks(), plan.threads);
      reading_ += measure_time([&] { batch.read(); }).seconds;
      work(batch, first);
    }
  }

  KeptWatcher watcher_;
  double reading_ = 0;
  int waves_ = 0;
  Walks walks_;
  Streams streams_;
  cuda::Products product_;
};

}  // namespace

std::unique_ptr<CudaReplayer> cuda_replayer(KeptWatcher watcher) {
  if (!cuda::has_device())
    throw std::runtime_error("--device: no CUDA device on this machine; use --device cpu");
  if (const std::string why = kernels::why_not_device(); !why.empty())
    throw std::runtime_error("--device: " + why + "; or use --device cpu");
  return std::make_unique<Replayer>(std::move(watcher));
}

}  // namespace kvlab
