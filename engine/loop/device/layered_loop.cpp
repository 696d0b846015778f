#include "engine/loop/device/layered_loop.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/cuda/device_scores.hpp"
#include "engine/cuda/model/device_layers.hpp"
#include "kernels/host/transfer.hpp"
#include "policies/columns/columns.hpp"
#include "policies/executor.hpp"
#include "sim/device/loop_attention.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr int kTileRows = 8192;             // that go through a product together
constexpr std::size_t kScoredRows = 1024;   // whose logits are held at once
constexpr double kUsableMemory = 0.9;       // of what is free
constexpr std::size_t kReserve = 1u << 29;  // what CUDA loads later

/// What a sweep keeps from sequence to sequence.
struct DeviceLoop {
  explicit DeviceLoop(const DeviceModel& of)
      : model(of),
        layers(model, kTileRows, streams.first()),
        projections(kTileRows * (model.config().query_heads + 2 * model.config().kv_heads) *
                        model.key_bytes(),
                    "the closed loop") {}

  const DeviceModel& model;
  Streams streams;
  Walks walks;
  cuda::Products product;
  DeviceLayers layers;
  cuda::DeviceBuffer projections;  // [row of a tile, query heads, key heads, value heads, dim]
};

/// Whose threshold counts: it means nothing to a cache that never evicts.
const CacheConfig& first_evicting(std::span<const CacheConfig> configs) {
  const auto found = std::ranges::find_if(configs, &CacheConfig::evicts);
  return found == configs.end() ? configs.front() : *found;
}

void refuse(const DeviceModel& model, std::span<const CacheConfig> configs) {
  const double threshold = first_evicting(configs).threshold;
  for (const CacheConfig& config : configs) {
    check_held(kCudaLoop, config);
    if (config.evicts_by_layer() && !walks_layers(model.config().shape()))
      throw std::invalid_argument(
          fmt::format("policy {}: under scope=layer the closed loop on CUDA walks at most {} KV "
                      "heads, on a device of compute capability 9.0 or more; --device cpu has no "
                      "such bound",
                      config.policy.name, kernels::kMostLayerHeads));
    if (config.evicts() && config.threshold != threshold)
      throw std::invalid_argument(
          fmt::format("request thresholds {} and {}: the closed loop by layers has one for all; "
                      "--by-tokens takes both",
                      threshold, config.threshold));
  }
}

ModelShape shape_of(const DeviceModel& model) {
  ModelShape shape = model.config().shape();
  shape.dtype = model.dtype();
  return shape;
}

/// Null where no column takes them.
std::shared_ptr<const OutputProjections> projections_for(const DeviceModel& model,
                                                         std::span<const CacheConfig> configs) {
  const bool wanted = std::ranges::any_of(
      configs, [](const CacheConfig& config) { return wants_projections(config.policy.columns); });
  return wanted ? model.output_projections() : nullptr;
}

HeadArithmetic arithmetic_of(const DeviceModel& model, const CacheConfig& config) {
  const bool rounds = model.dtype() != Dtype::f32;
  return {.softmax_scale = model.config().softmax_scale(),
          .rounding = rounds ? std::optional(model.dtype()) : std::nullopt,
          .threshold16 = request_threshold16(config.threshold)};
}

/// Hidden states and what attention takes and gives, of configurations side by side; a row is a
/// token of one of them.
struct GroupMemory {
  GroupMemory(cuda::Arena& arena, const DeviceModel& model, std::size_t rows)
      : x(arena.take<float>(rows * model.config().hidden)),
        heads(arena.take<std::byte>(rows * model.config().query_heads * model.key_bytes())),
        configs(arena.take<std::int32_t>(rows)),
        tokens(arena.take<std::int32_t>(rows)) {}
  GroupMemory() = default;
  float* x = nullptr;          // [row, hidden]
  std::byte* heads = nullptr;  // [row, query_head, dim]: queries, then outputs
  std::int32_t *configs = nullptr, *tokens = nullptr;  // [row]
};

/// One sequence under all configurations.
class SequenceRun {
 public:
  SequenceRun(DeviceLoop& on, const Ids& ids, std::span<const CacheConfig> configs,
              const LoopOptions& options)
      : on_(on),
        config_(on.model.config()),
        ids_(ids),
        options_(options),
        span_(loop_span(static_cast<std::uint32_t>(ids.size()), options)),
        segments_(segments_of(static_cast<std::uint32_t>(ids.size()), span_.prompt)),
        shape_(shape_of(on.model)),
        angles_(config_.rope, static_cast<std::uint32_t>(ids.size())),
        arithmetic_(arithmetic_of(on.model, first_evicting(configs))),
        every_query_(segments_, Span::all, 1),
        output_(projections_for(on.model, configs)),
        plan_{shape_,       config_.rope, angles_,          arithmetic_,
              every_query_, tokens(),     options.sequence, output_.get()},
        tables_(plan_),
        rows_(LoopAttention::rows(ids.size())),
        scores_(configs.size()) {
    for (const CacheConfig& config : configs)
      resolved_.push_back(resolve(config, segments_, options.sequence, config_.heads()));
    for (const ResolvedConfig& config : resolved_) pointers_.push_back(&config);
    Ids padded = ids;
    padded.resize(rows_, ids.front());
    device_ids_ = cuda::upload(padded, "token ids");
    for (auto* logits : {&full_logits_, &logits_})
      *logits =
          cuda::DeviceBuffer(scored_at_once() * config_.vocab * sizeof(float), "rows of logits");
    full_x_ = cuda::DeviceBuffer(rows_ * config_.hidden * sizeof(float), "hidden states");
  }

  std::vector<LoopScores> run() {
    const std::size_t at_once = configs_at_once();
    for (std::size_t first = 0; first < pointers_.size(); first += at_once) {
      const std::size_t count = std::min(at_once, pointers_.size() - first);
      const std::span group = std::span(pointers_).subspan(first, count);
      const cuda::Placed<GroupMemory> memory("hidden states", on_.model, count * rows_);
      forward(group, *memory, first);
      if (first == 0) cuda::copy(full_x_.as<float>(), memory->x, rows_ * config_.hidden, stream());
      score(*memory, first, count);
    }
    return std::move(scores_);
  }

 private:
  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids_.size()); }
  std::size_t scored() const { return ids_.size() - 1 - span_.first_scored; }
  std::size_t scored_at_once() const { return std::min(kScoredRows, scored()); }
  cudaStream_t stream() const { return on_.streams.first(); }

  std::size_t configs_at_once() const {
    const std::size_t of_config = LoopAttention::bytes_of_config(plan_, pointers_) +
                                  cuda::Placed<GroupMemory>::bytes(on_.model, rows_);
    const cuda::MemoryInfo memory = cuda::memory_info();
    const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
    const std::size_t fit = (usable - std::min(usable, kReserve)) / of_config;
    if (fit == 0)
      throw std::runtime_error(fmt::format(
          "device memory: one configuration of {} tokens needs {}, {} of {} are free; a smaller "
          "--window or --max-tokens would fit, or --by-tokens",
          ids_.size(), cuda::bytes_text(of_config), cuda::bytes_text(memory.free),
          cuda::bytes_text(memory.total)));
    return std::min(fit, pointers_.size());
  }

  /// Calls each(first row, rows) for tiles of all rows.
  template <class Each>
  void in_tiles(std::size_t rows, Each each) const {
    for (std::size_t first = 0; first < rows; first += kTileRows)
      each(first, static_cast<int>(std::min<std::size_t>(kTileRows, rows - first)));
  }

  /// Leaves the hidden states behind the last layer.
  void forward(std::span<const ResolvedConfig* const> group, const GroupMemory& memory,
               std::size_t first) {
    LoopAttention attention(plan_, group, tables_, options_.threads, on_.product, on_.streams,
                            on_.walks);
    note_rows(memory, group.size());
    for (std::size_t c = 0; c < group.size(); ++c) {
      on_.layers.embed(device_ids_.as<std::int32_t>(), static_cast<int>(rows_),
                       memory.x + c * rows_ * config_.hidden);
      scores_[first + c].kv_bytes_peak = attention.live_max(c) * 2 * on_.model.key_bytes();
    }
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      throw_if_cancelled();
      project(layer, memory, attention, group.size() * rows_);
      attention.attend(layer, memory.heads, memory.heads);
      finish(layer, memory, group.size() * rows_);
      on_.streams.synchronize();
      note_done(first * config_.layers + (layer + 1) * group.size());
    }
  }

  void note_rows(const GroupMemory& memory, std::size_t configs) const {
    Ids config, token;
    for (std::size_t c = 0; c < configs; ++c) {
      config.insert(config.end(), rows_, static_cast<std::int32_t>(c));
      token.resize(token.size() + rows_);
      std::iota(token.end() - static_cast<std::ptrdiff_t>(rows_), token.end(), 0);
    }
    cuda::write(memory.configs, config, "the closed loop");
    cuda::write(memory.tokens, token, "the closed loop");
  }

  /// Queries to memory.heads, keys and values to where attention reads them, before RoPE.
  void project(std::uint32_t layer, const GroupMemory& memory, const LoopAttention& attention,
               std::size_t all_rows) {
    const std::size_t of_head = rows_ * config_.head_size;
    in_tiles(all_rows, [&](std::size_t first, int rows) {
      kernels::RopeWriteArgs write{};
      write.rotated = 0;
      write.sequences = memory.configs + first;
      write.slots = memory.tokens + first;
      write.keys = attention.keys();
      write.values = attention.values();
      write.sequence_stride = static_cast<std::int64_t>(of_head * config_.kv_heads);
      write.head_stride = static_cast<std::int64_t>(of_head);
      write.q = outputs(memory, first);
      on_.layers.qkv(layer, rows, memory.x + first * config_.hidden,
                     {.qkv = on_.projections.data()}, write);
    });
  }

  void finish(std::uint32_t layer, const GroupMemory& memory, std::size_t all_rows) {
    in_tiles(all_rows, [&](std::size_t first, int rows) {
      float* const x = memory.x + first * config_.hidden;
      on_.layers.output(layer, rows, x, {.out = outputs(memory, first)});
      on_.layers.gated(layer, rows, x);
      on_.layers.down(layer, rows, x);
    });
  }

  std::byte* outputs(const GroupMemory& memory, std::size_t row) const {
    return memory.heads + row * config_.query_heads * on_.model.key_bytes();
  }

  void score(const GroupMemory& memory, std::size_t first_config, std::size_t configs) {
    for (std::size_t first = 0; first < scored(); first += scored_at_once()) {
      const std::size_t count = std::min(scored_at_once(), scored() - first),
                        row = (span_.first_scored + first) * config_.hidden;
      on_.layers.head(full_x_.as<float>() + row, static_cast<int>(count), full_logits_.as<float>());
      for (std::size_t c = 0; c < configs; ++c) {
        const bool itself = is_yardstick(first_config + c);
        if (first_config + c > 0)
          on_.layers.head(memory.x + c * rows_ * config_.hidden + row, static_cast<int>(count),
                          logits_.as<float>());
        on_.streams.synchronize();
        const cuda::DeviceBuffer& logits = first_config + c == 0 ? full_logits_ : logits_;
        note_scores(first_config + c, first, count, logits, itself ? logits : full_logits_);
      }
    }
  }
  bool is_yardstick(std::size_t c) const { return c == 0 || !options_.against_first; }

  void note_scores(std::size_t c, std::size_t first, std::size_t count,
                   const cuda::DeviceBuffer& logits, const cuda::DeviceBuffer& yardstick) {
    Ids rows(count);
    std::iota(rows.begin(), rows.end(), 0);
    const std::span next = std::span(ids_).subspan(span_.first_scored + first + 1, count);
    for (const RowScore& score : device_scores({.logits = logits.as<float>(),
                                 .yardstick = yardstick.as<float>(),
                                 .yardstick_rows = rows,
                                 .next = next},
                                               config_.vocab)) {
      scores_[c].nll.push_back(score.nll);
      scores_[c].kl.push_back(is_yardstick(c) ? 0 : score.kl);
      scores_[c].same_first.push_back(is_yardstick(c) || score.same_first);
    }
  }

  void note_done(std::size_t layers) const {
    if (options_.progress)
      options_.progress(static_cast<double>(layers) /
                        static_cast<double>(pointers_.size() * config_.layers));
  }

  DeviceLoop& on_;
  const ModelConfig& config_;
  const Ids& ids_;
  const LoopOptions& options_;
  const LoopSpan span_;
  const std::vector<Segment> segments_;
  const ModelShape shape_;
  const RopeTable angles_;
  const HeadArithmetic arithmetic_;
  const QuerySpan every_query_;
  const std::shared_ptr<const OutputProjections> output_;
  const UnitsPlan plan_;
  const Tables tables_;
  const std::size_t rows_;  ///< of a configuration
  std::vector<ResolvedConfig> resolved_;
  std::vector<const ResolvedConfig*> pointers_;
  cuda::DeviceBuffer device_ids_, full_x_, full_logits_, logits_;
  std::vector<LoopScores> scores_;
};

}  // namespace

Sweep sweep_by_device_layers(const DeviceModel& model) {
  const auto loop = std::make_shared<DeviceLoop>(model);
  return [loop](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                const EvalOptions& options) {
    refuse(loop->model, configs);
    return sweep_in_turn(sequences, options, [&](const Ids& ids, const LoopOptions& how) {
      return SequenceRun(*loop, ids, configs, how).run();
    });
  };
}

}  // namespace kvlab
