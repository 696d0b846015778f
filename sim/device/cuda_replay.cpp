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

/// `units`, and the other KV heads of their layers where some caches evict by layer.
std::vector<ReplayUnit> whole_layers(const ReplayPlan& plan, std::span<const ReplayUnit> units) {
  std::vector<ReplayUnit> all(units.begin(), units.end());
  if (std::ranges::none_of(plan.configs, &ResolvedConfig::evicts_by_layer)) return all;
  all.clear();
  std::set<std::uint32_t> layers;
  for (const ReplayUnit& unit : units)
    if (layers.insert(unit.layer).second)
      for (std::uint32_t head = 0; head < plan.trace.shape().kv_heads; ++head)
        all.push_back({unit.layer, head});
  return all;
}

/// Whether all layers attend as a device does.
bool knows_rows(const TraceReader& trace) {
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
    const RowSpec& row = trace.row(layer);
    if (!refusal_of_rows(kCudaReplay, row.softcap > 0, !row.sinks.empty()).empty()) return false;
  }
  return true;
}

/// Units whose layers turn and scale alike, as one batch has them: by table and scale.
using Alike = std::map<std::pair<std::uint32_t, float>, std::vector<ReplayUnit>>;

Alike alike(const TraceReader& trace, std::span<const ReplayUnit> units) {
  Alike groups;
  for (const ReplayUnit& unit : units)
    groups[{trace.row(unit.layer).table, trace.row(unit.layer).scale}].push_back(unit);
  return groups;
}

std::size_t index_of(const ReplayUnit& unit, const std::vector<ReplayUnit>& all) {
  const auto same = [&](const ReplayUnit& other) {
    return other.layer == unit.layer && other.kv_head == unit.kv_head;
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
           shape.group() <= kernels::kMostReplayGroup &&
           shape.head_size <= kernels::kMostReplayHeadSize && shape.head_size % 8 == 0 &&
           trace.row(0).rope.rotated() % 4 == 0 && knows_rows(trace) &&
           (!config.policy.ladder.is_coded() || shape.head_size % kCodeBlock == 0) &&
           (config.policy.modifiers.scope == Modifiers::Scope::head || walks_layers(shape)) &&
           fits(trace, config);
  }

  double reading_seconds() const override { return reading_; }

  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                            std::span<const ReplayUnit> units) override {
    std::vector<std::vector<HeadOutcome>> all, asked;
    const std::vector<ReplayUnit> wanted = whole_layers(plan, units);
    std::vector<ReplayUnit> whole;
    const auto watch = [&](std::size_t unit, std::size_t config, std::uint32_t query, auto live) {
      watcher_(index_of(whole[unit], wanted), config, query, live);
    };
    for (const auto& [key, group] : alike(plan.trace, wanted)) {
      const std::size_t before = whole.size();
      whole.insert(whole.end(), group.begin(), group.end());
      in_batches(plan, group, [&](Batch& batch, std::size_t first) {
        if (watcher_) batch.keep_sets();
        batch.replay(walks_);
        if (watcher_) batch.show_sets(before + first, watch);
        waves_ = batch.units().waves(walks_);
        for (auto& outcomes : batch.outcomes()) all.push_back(std::move(outcomes));
      });
    }
    for (const ReplayUnit& unit : units) asked.push_back(std::move(all[index_of(unit, whole)]));
    return asked;
  }

  int waves() const override { return waves_; }

  ExactPass exact_pass(const TraceReader& trace, unsigned threads) override {
    const LayerRopes ropes(trace);
    const std::vector<HeadArithmetic> arithmetics(trace.shape().layers, arithmetic_of(trace, 0, 0));
    const QuerySpan span(trace.segments(), Span::all, 1);
    const ReplayPlan plan{trace, 0, ropes, arithmetics, span, threads, {}, nullptr};
    std::vector<ReplayUnit> units;
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head)
        units.push_back({layer, kv_head});
    ExactPass pass;
    in_batches(plan, units, [&](Batch& batch, std::size_t) {
      batch.attend();  // chooses algorithms
      const WorkTime time = timed([&] { pass.flops += batch.attend(); });
      pass.time.seconds += time.seconds;
      pass.time.cpu_seconds += time.cpu_seconds;
    });
    return pass;
  }

 private:
  /// Whether so long a text fits the device's shared memory; the CPU takes the others.
  static bool fits(const TraceReader& trace, const CacheConfig& config) {
    using kernels::ReplayTokens;
    const kernels::ReplayShape shape{.tokens = static_cast<int>(trace.tokens()),
                                     .group = static_cast<int>(trace.shape().group()),
                                     .head_size = static_cast<int>(trace.shape().head_size)};
    const auto rungs = static_cast<int>(config.policy.ladder.rungs.size());
    const bool squeezed = config.positions == Positions::cache;
    kernels::DeviceLimits limits;
    cuda::check(kernels::device_limits(limits), "asking for the device's limits");
    return kernels::replay_outputs_plan(KVLAB_F32, limits).fits() &&
           kernels::walk_fits(shape,
                              squeezed    ? ReplayTokens::squeezed
                              : rungs > 0 ? ReplayTokens::ladder
                                          : ReplayTokens::exact,
                              rungs, limits);
  }
  /// Calls work(batch, index of its first unit) for as many units at a time as fit; of layers that
  /// turn and scale alike.
  template <class Work>
  void in_batches(const ReplayPlan& plan, std::span<const ReplayUnit> units, Work work) {
    const std::uint32_t layer = units.front().layer;
    const UnitsPlan common{
        plan.trace.shape(), plan.trace.row(layer).rope, plan.ropes[layer], plan.arithmetics[layer],
        plan.span,          plan.trace.tokens(),        plan.sequence};
    const ProjectionColumns columns = projection_columns(plan.trace, plan.span.span());
    const Grid grid(plan.configs, common.tokens, !plan.span.named().empty(), columns.residual > 0);
    const Tables tables(common);
    UnitSizes sizes = sizes_of(common, grid, grid.configs);
    sizes.columns = columns;
    const std::size_t landing = sizes.land_at_once(units.size(), plan.threads) * sizes.landing(),
                      at_once = std::min(
                          units_at_once(sizes, landing, grid.by_layer ? common.shape.kv_heads : 1),
                          units.size());
    for (std::size_t first = 0; first < units.size(); first += at_once) {
      Batch batch(plan, common, grid, sizes,
                  units.subspan(first, std::min(at_once, units.size() - first)), tables, product_,
                  streams_);
      walks_.load(batch.units().walks(), plan.threads);
      reading_ += timed([&] { batch.read(); }).seconds;
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
