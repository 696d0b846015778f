#include "sim/device/cuda_replay.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "kernels/host/transfer.hpp"
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

std::size_t index_of(const ReplayUnit& unit, const std::vector<ReplayUnit>& all) {
  const auto same = [&](const ReplayUnit& other) {
    return other.layer == unit.layer && other.kv_head == unit.kv_head;
  };
  return static_cast<std::size_t>(std::ranges::find_if(all, same) - all.begin());
}

class Replayer final : public CudaReplayer {
 public:
  explicit Replayer(KeptWatcher watcher) : watcher_(std::move(watcher)) {}

  bool takes(const TraceHeader& header, const CacheConfig& config) const override {
    const ModelShape& shape = header.shape;
    const PolicyEntry* const entry = config.policy.entry.get();
    return refusal(kCudaReplay, config).empty() && kernels::has_text(*entry) &&
           shape.group() <= kernels::kMostReplayGroup &&
           shape.head_size <= kernels::kMostReplayHeadSize && shape.head_size % 8 == 0 &&
           header.rope.rotated() % 4 == 0 &&
           (config.policy.modifiers.scope == Modifiers::Scope::head || walks_layers(shape));
  }

  double reading_seconds() const override { return reading_; }

  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                            std::span<const ReplayUnit> units) override {
    std::vector<std::vector<HeadOutcome>> all, asked;
    const std::vector<ReplayUnit> whole = whole_layers(plan, units);
    in_batches(plan, whole, [&](Batch& batch, std::size_t first) {
      if (watcher_) batch.keep_sets();
      batch.replay(walks_);
      if (watcher_) batch.show_sets(first, watcher_);
      waves_ = batch.units().waves(walks_);
      for (auto& outcomes : batch.outcomes()) all.push_back(std::move(outcomes));
    });
    for (const ReplayUnit& unit : units) asked.push_back(std::move(all[index_of(unit, whole)]));
    return asked;
  }

  int waves() const override { return waves_; }

  ExactPass exact_pass(const TraceReader& trace, unsigned threads) override {
    const RopeTable rope(trace.header().rope, trace.tokens());
    const HeadArithmetic arithmetic{.softmax_scale = trace.header().softmax_scale,
                                    .rounding = trace.header().rounding == Rounding::model_dtype
                                                    ? std::optional(trace.shape().dtype)
                                                    : std::nullopt};
    const QuerySpan span(trace.segments(), Span::all, 1);
    const ReplayPlan plan{trace, 0, rope, arithmetic, span, threads, {}, nullptr};
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
  /// Calls work(batch, index of its first unit) for as many units at a time as fit.
  template <class Work>
  void in_batches(const ReplayPlan& plan, std::span<const ReplayUnit> units, Work work) {
    const TraceHeader& header = plan.trace.header();
    const UnitsPlan common{header.shape, header.rope,         plan.rope,    plan.arithmetic,
                           plan.span,    plan.trace.tokens(), plan.sequence};
    const Grid grid(plan.configs, common.tokens, !plan.span.named().empty());
    const Tables tables(common);
    UnitSizes sizes = sizes_of(common, grid, plan.configs.size());
    sizes.columns = projection_columns(plan.trace, plan.span.span());
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
  return std::make_unique<Replayer>(std::move(watcher));
}

}  // namespace kvlab
