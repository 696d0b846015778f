#include "sim/device/cuda_replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/host/transfer.hpp"
#include "sim/device/batch.hpp"

namespace kvlab {
namespace {

using kernels::Type;

constexpr int kTokenMultiple = 16;         // rows of products begin aligned
constexpr std::uint32_t kFine = 64;        // angles are composed of a multiple of it and the rest
constexpr double kUsableMemory = 0.9;      // of what is free
constexpr std::size_t kMostUnits = 65535;  // of a grid

class Replayer final : public CudaReplayer {
 public:
  explicit Replayer(KeptWatcher watcher) : watcher_(std::move(watcher)) {}

  bool takes(const TraceHeader& header, const CacheConfig& config) const override {
    const ModelShape& shape = header.shape;
    const PolicyEntry* const entry = config.policy.entry.get();
    return entry && kernels::has_text(*entry) && shape.group() <= kernels::kMostReplayGroup &&
           shape.head_size <= kernels::kMostReplayHeadSize && shape.head_size % 8 == 0 &&
           header.rope.rotated() % 4 == 0;
  }

  double reading_seconds() const override { return reading_; }

  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                            std::span<const ReplayUnit> units) override {
    std::vector<std::vector<HeadOutcome>> all;
    in_batches(plan, units, [&](Batch& batch, std::size_t first) {
      if (watcher_) batch.keep_sets();
      batch.replay(walks_);
      if (watcher_) batch.show_sets(first, watcher_);
      waves_ = batch.waves(walks_);
      for (auto& outcomes : batch.outcomes()) all.push_back(std::move(outcomes));
    });
    return all;
  }

  int waves() const override { return waves_; }

  ExactPass exact_pass(const TraceReader& trace, unsigned threads) override {
    const RopeTable rope(trace.header().rope, trace.tokens());
    const HeadArithmetic arithmetic{.softmax_scale = trace.header().softmax_scale,
                                    .rounding = trace.header().rounding == Rounding::model_dtype
                                                    ? std::optional(trace.shape().dtype)
                                                    : std::nullopt};
    const QuerySpan span(trace.segments(), false, 1);
    const ReplayPlan plan{trace, 0, rope, arithmetic, span, threads, {}};
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
    const Grid grid(plan);
    const int pairs = pairs_of(plan.trace.shape());
    const Tables tables{cuda::upload(rope_of(plan.rope), "the angles"),
                        cuda::upload(coarse_rope_of(plan.rope, pairs), "the angles"),
                        cuda::upload(fine_rope_of(plan.trace.header().rope, pairs), "the angles"),
                        cuda::upload(span_of(plan), "the span"),
                        cuda::upload(named_of(plan), "the span")};
    const UnitSizes sizes = sizes_of(plan, grid);
    const std::size_t at_once = units_at_once(sizes, units.size(), plan.threads);
    for (std::size_t first = 0; first < units.size(); first += at_once) {
      Batch batch(plan, grid, sizes, units.subspan(first, std::min(at_once, units.size() - first)),
                  tables, product_, streams_);
      walks_.load(batch.walks(), plan.threads);
      reading_ += timed([&] { batch.read(); }).seconds;
      work(batch, first);
    }
  }

  static std::vector<float2> rope_of(const RopeTable& rope) {
    std::vector<float2> angles;
    for (std::uint32_t position = 0; position < rope.positions(); ++position)
      for (std::size_t d = 0; d < rope.cosines(position).size(); ++d)
        angles.push_back({rope.cosines(position)[d], rope.sines(position)[d]});
    return angles;
  }

  static int pairs_of(const ModelShape& shape) {
    return kernels::ReplayShape{.head_size = static_cast<int>(shape.head_size)}.pairs();
  }

  /// Of multiples of kFine, by pairs; what does not rotate, by nothing.
  static std::vector<float2> coarse_rope_of(const RopeTable& rope, int pairs) {
    std::vector<float2> angles;
    for (std::uint32_t position = 0; position < rope.positions(); position += kFine) {
      const auto cosines = rope.cosines(position), sines = rope.sines(position);
      for (std::size_t d = 0; d < static_cast<std::size_t>(pairs); ++d)
        angles.push_back(d < cosines.size() ? float2{cosines[d], sines[d]} : float2{1, 0});
    }
    return angles;
  }

  static std::vector<float2> fine_rope_of(const Rope& rope, int pairs) {
    std::vector<float2> angles;
    for (std::uint32_t position = 0; position < kFine; ++position)
      for (std::size_t d = 0; d < static_cast<std::size_t>(pairs); ++d) {
        const double frequency = d < rope.inv_freq.size() ? rope.inv_freq[d] : 0.0,
                     angle = position * frequency;
        angles.push_back(
            {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
      }
    return angles;
  }

  static std::vector<std::int32_t> span_of(const ReplayPlan& plan) {
    std::vector<std::int32_t> index;
    std::int32_t next = 0;
    for (std::uint32_t query = 0; query < plan.trace.tokens(); ++query)
      index.push_back(plan.span.contains(query) ? next++ : -1);
    return index;
  }

  static std::vector<int2> named_of(const ReplayPlan& plan) {
    std::vector<int2> ends;
    for (const NamedSpan& span : plan.span.named())
      ends.push_back({static_cast<int>(span.start), static_cast<int>(span.start + span.tokens)});
    return ends;
  }

  static UnitSizes sizes_of(const ReplayPlan& plan, const Grid& grid) {
    const ModelShape& shape = plan.trace.shape();
    const Type rounding = type_of(plan.arithmetic.rounding);
    return {.tokens = (plan.trace.tokens() + kTokenMultiple - 1) / kTokenMultiple * kTokenMultiple,
            .group = shape.group(),
            .dim = shape.head_size,
            .pairs = static_cast<std::size_t>(pairs_of(shape)),
            .quads = (shape.group() + 3) / 4,
            .block = kernels::kMostReplayQueries,
            .slots = static_cast<std::size_t>(grid.unit_slots),
            .configs = plan.configs.size(),
            .windows = grid.windows.size(),
            .samples = plan.span.samples(),
            .block_samples = (kernels::kMostReplayQueries + plan.span.sample_every() - 1) /
                             plan.span.sample_every(),
            .named = plan.span.named().size(),
            .slot_stride = static_cast<std::size_t>(grid.slot_stride),
            .product_bytes = kernels::bytes_of(rounding),
            .element_bytes = bytes_of(shape.dtype),
            .squeezed = grid.squeezed,
            .rounds = rounding != Type::f32,
            .columns = projection_columns(plan.trace)};
  }

  static std::size_t units_at_once(const UnitSizes& sizes, std::size_t units, unsigned threads) {
    const cuda::MemoryInfo memory = cuda::memory_info();
    const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
    const std::size_t landing = sizes.land_at_once(units, threads) * sizes.landing();
    const std::size_t of_unit = bytes_of(sizes, 1),
                      fit = (usable - std::min(usable, landing)) / of_unit;
    if (fit == 0)
      throw std::runtime_error(
          fmt::format("device memory: one KV head of this replay needs {}, {} of {} are free; "
                      "fewer budgets at once need less, or use --device cpu",
                      cuda::bytes_text(of_unit + landing), cuda::bytes_text(memory.free),
                      cuda::bytes_text(memory.total)));
    return std::min({fit, units, kMostUnits});
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
