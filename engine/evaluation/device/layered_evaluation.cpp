#include "engine/evaluation/device/layered_evaluation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/cuda/device_scores.hpp"
#include "engine/cuda/fill.hpp"
#include "engine/cuda/model/device_layers.hpp"
#include "kernels/cache/rope_rows.hpp"
#include "kernels/host/transfer.hpp"
#include "policies/executor.hpp"
#include "policies/features/features.hpp"
#include "sim/device/eval_attention.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr int kTileRows = 8192;             // number of rows of one product
constexpr std::size_t kScoredRows = 1024;   // rows of logits in memory at once
constexpr double kUsableMemory = 0.9;       // share of the free memory
constexpr std::size_t kReserve = 1u << 29;  // bytes that CUDA needs later

/// State that a sweep keeps from sequence to sequence.
struct DeviceEvaluation {
  explicit DeviceEvaluation(const DeviceModel& device_model)
      : model(device_model),
        layers(model, kTileRows, streams.first()),
        projections(kTileRows * (model.config().query_heads + 2 * model.config().kv_heads) *
                        model.key_bytes(),
                    "the end-to-end evaluation") {}

  const DeviceModel& model;
  Streams streams;
  Walks walks;
  cuda::Products product;
  DeviceLayers layers;
  cuda::DeviceBuffer projections;  // [row of a tile, query heads, key heads, value heads, dim]
};

/// The first configuration that evicts, or else the first one. The whole run uses the request
/// threshold of this configuration. refuse() makes sure that all evicting configurations have the
/// same threshold, and caches that never evict need none.
const CacheConfig& first_evicting(std::span<const CacheConfig> configs) {
  const auto found = std::ranges::find_if(configs, &CacheConfig::evicts);
  return found == configs.end() ? configs.front() : *found;
}

void refuse(const DeviceModel& model, std::span<const CacheConfig> configs) {
  if (const std::string what = beyond_device_layers(model.config()); !what.empty())
    throw std::invalid_argument(
        fmt::format("{}: the end-to-end evaluation on CUDA does not support {}; use --by-tokens",
                    model.config().name, what));
  const double threshold = first_evicting(configs).threshold;
  for (const CacheConfig& config : configs) {
    check_held(kCudaEvaluation, config);
    if (config.policy.tier_plan.is_quantized()) check_quantized_heads(model.config().head_size);
    if (config.evicts_by_layer() && !walks_layers(model.config().shape()))
      throw std::invalid_argument(
          fmt::format("policy {}: under scope=layer the end-to-end evaluation on CUDA supports at "
                      "most {} KV heads, and needs compute capability 9.0; use --device cpu",
                      config.policy.name, kernels::kMaxLayerHeads));
    if (config.evicts() && config.threshold != threshold)
      throw std::invalid_argument(
          fmt::format("request thresholds {} and {}: on CUDA the end-to-end evaluation needs one "
                      "for all configurations; use --by-tokens",
                      threshold, config.threshold));
  }
}

ModelShape shape_of(const DeviceModel& model) {
  ModelShape shape = model.config().shape();
  shape.dtype = model.dtype();
  return shape;
}

/// The output projections; null if no feature reads them.
std::shared_ptr<const OutputProjections> projections_for(const DeviceModel& model,
                                                         std::span<const CacheConfig> configs) {
  const bool wanted = std::ranges::any_of(
      configs, [](const CacheConfig& config) { return wants_projections(config.policy.features); });
  return wanted ? model.output_projections() : nullptr;
}

HeadArithmetic arithmetic_of(const DeviceModel& model, const CacheConfig& config) {
  const bool rounds = model.dtype() != Dtype::f32;
  return {.softmax_scale = model.config().softmax_scale(),
          .rounding = rounds ? std::optional(model.dtype()) : std::nullopt,
          .threshold16 = request_threshold16(config.threshold)};
}

/// The rows of a group of configurations: first the shared rows, which are computed once, then the
/// separate rows of each configuration.
struct EvalRows {
  std::size_t shared, own, configs;
  std::size_t all() const { return shared + configs * own; }
  /// Number of rows of a configuration in attention.
  std::size_t config_rows() const { return shared + own; }
  /// The index of the row of a token that is not shared.
  std::size_t row(std::size_t config, std::size_t token) const { return config * own + token; }
};

/// Hidden states, and inputs and outputs of attention.
struct GroupMemory {
  GroupMemory(cuda::Arena& arena, const DeviceModel& model, const EvalRows& rows)
      : x(arena.take<float>(rows.all() * model.config().hidden)),
        heads(arena.take<std::byte>(rows.all() * row_bytes(model))),
        configs(arena.take<std::int32_t>(rows.all())),
        tokens(arena.take<std::int32_t>(rows.all())),
        whole(rows.shared == 0
                  ? heads
                  : arena.take<std::byte>(rows.configs * rows.config_rows() * row_bytes(model))) {}
  GroupMemory() = default;
  static std::size_t row_bytes(const DeviceModel& model) {
    return model.config().query_heads * model.key_bytes();
  }
  float* x = nullptr;          // [row, hidden]
  std::byte* heads = nullptr;  // [row, query_head, dim]: queries, later outputs
  std::int32_t *configs = nullptr, *tokens = nullptr;  // [row]
  std::byte* whole =
      nullptr;  // [config, token, query_head, dim]: `heads`, in the layout for attention
};

/// One sequence under all configurations.
class SequenceRun {
 public:
  SequenceRun(DeviceEvaluation& on, const Ids& ids, std::span<const CacheConfig> configs,
              const SequenceOptions& options)
      : on_(on),
        config_(on.model.config()),
        ids_(ids),
        options_(options),
        range_(scored_range(static_cast<std::uint32_t>(ids.size()), options)),
        segments_(segments_of(static_cast<std::uint32_t>(ids.size()), range_.prompt)),
        shape_(shape_of(on.model)),
        angles_(config_.rope(), static_cast<std::uint32_t>(ids.size())),
        arithmetic_(arithmetic_of(on.model, first_evicting(configs))),
        every_query_(segments_, Queries::all, 1),
        output_(projections_for(on.model, configs)),
        plan_{shape_,       config_.rope(), angles_,          arithmetic_,
              every_query_, tokens(),       options.sequence, output_.get()},
        tables_(plan_),
        rows_(EvalAttention::rows(ids.size())),
        scores_(configs.size()) {
    for (const CacheConfig& config : configs)
      resolved_.push_back(resolve(config, segments_, options.sequence, config_.heads()));
    for (const ResolvedConfig& config : resolved_) pointers_.push_back(&config);
    if (std::ranges::all_of(resolved_, [&](const ResolvedConfig& config) {
          return appends_prompt_at_once(config, range_);
        }))
      shared_ = std::min(range_.prompt, range_.first_scored);
    Ids padded = ids;
    padded.resize(rows_, ids.front());
    device_ids_ = cuda::upload(padded, "token ids");
    for (auto* logits : {&full_logits_, &logits_})
      *logits =
          cuda::DeviceBuffer(scored_at_once() * config_.vocab * sizeof(float), "rows of logits");
    full_x_ = cuda::DeviceBuffer(rows_ * config_.hidden * sizeof(float), "hidden states");
    if (config_.has_windows()) make_window_rope();
  }

  std::vector<TokenScores> run() {
    const std::size_t group_configs = configs_at_once();
    for (std::size_t first = 0; first < pointers_.size(); first += group_configs) {
      const std::size_t count = std::min(group_configs, pointers_.size() - first);
      const std::span group = std::span(pointers_).subspan(first, count);
      const EvalRows rows = rows_of(count);
      const cuda::Placed<GroupMemory> memory("hidden states", on_.model, rows);
      forward(group, rows, *memory, first);
      if (first == 0) cuda::copy(full_x_.as<float>(), memory->x, rows_ * config_.hidden, stream());
      score(*memory, rows, first);
    }
    return std::move(scores_);
  }

 private:
  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids_.size()); }
  std::size_t scored() const { return ids_.size() - 1 - range_.first_scored; }
  std::size_t scored_at_once() const { return std::min(kScoredRows, scored()); }
  cudaStream_t stream() const { return on_.streams.first(); }
  EvalRows rows_of(std::size_t configs) const { return {shared_, rows_ - shared_, configs}; }

  std::size_t configs_at_once() const {
    const std::size_t config_bytes = EvalAttention::bytes_of_config(plan_, pointers_) +
                                     cuda::Placed<GroupMemory>::bytes(on_.model, rows_of(1));
    const cuda::MemoryInfo memory = cuda::memory_info();
    const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
    const std::size_t fit = (usable - std::min(usable, kReserve)) / config_bytes;
    if (fit == 0)
      throw std::runtime_error(fmt::format(
          "device memory: one configuration of {} tokens needs {}; only {} of {} are free; "
          "use a smaller --window or --max-tokens, or --by-tokens",
          ids_.size(), cuda::bytes_text(config_bytes), cuda::bytes_text(memory.free),
          cuda::bytes_text(memory.total)));
    return std::min(fit, pointers_.size());
  }

  /// Calls each(first row, rows) for tiles of all rows.
  template <class Each>
  void for_each_tile(std::size_t rows, Each each) const {
    for (std::size_t first = 0; first < rows; first += kTileRows)
      each(first, static_cast<int>(std::min<std::size_t>(kTileRows, rows - first)));
  }

  /// Runs all layers, and leaves the last hidden states in `memory`.
  void forward(std::span<const ResolvedConfig* const> group, const EvalRows& rows,
               const GroupMemory& memory, std::size_t first) {
    EvalAttention attention(plan_, group, tables_, options_.threads, on_.product, on_.streams,
                            on_.walks);
    embed(rows, memory);
    for (std::size_t c = 0; c < group.size(); ++c)
      scores_[first + c].kv_bytes_peak = attention.kv_bytes_peak(c);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      throw_if_cancelled();
      project(layer, memory, attention, rows.all());
      share(rows, memory, attention);
      if (config_.rows[layer].window > 0)
        attend_windows(layer, rows, memory, attention);
      else
        attention.attend(layer, memory.whole, memory.whole);
      gather(rows, memory);
      finish(layer, memory, rows.all());
      on_.streams.synchronize();
      note_done(first * config_.layers + (layer + 1) * group.size());
    }
  }

  /// Computes the embeddings, and stores for each row its token and its configuration.
  void embed(const EvalRows& rows, const GroupMemory& memory) {
    Ids config, token;
    const auto part = [&](std::size_t first, std::size_t count, std::size_t c) {
      on_.layers.embed(device_ids_.as<std::int32_t>() + first, static_cast<int>(count),
                       memory.x + config.size() * config_.hidden);
      config.insert(config.end(), count, static_cast<std::int32_t>(c));
      for (std::size_t i = 0; i < count; ++i) token.push_back(static_cast<std::int32_t>(first + i));
    };
    if (rows.shared > 0) part(0, rows.shared, 0);
    for (std::size_t c = 0; c < rows.configs; ++c) part(rows.shared, rows.own, c);
    cuda::write(memory.configs, config, "the end-to-end evaluation");
    cuda::write(memory.tokens, token, "the end-to-end evaluation");
  }

  /// Makes the RoPE table of the layers with a window, which share one.
  void make_window_rope() {
    const auto row =
        std::ranges::find_if(config_.rows, [](const RowSpec& one) { return one.window > 0; });
    const cuda::DeviceBuffer frequencies = cuda::upload(row->rope.inv_freq, "RoPE's frequencies");
    const std::size_t half = row->rope.inv_freq.size();
    window_rope_ = cuda::DeviceBuffer(rows_ * half * sizeof(float2), "RoPE");
    cuda::check(kernels::fill_rope_rows(frequencies.as<float>(), static_cast<int>(half), nullptr, 0,
                                        static_cast<int>(rows_), row->rope.factor,
                                        window_rope_.as<float2>(), stream()),
                "RoPE");
    on_.streams.synchronize();
  }

  /// Attention of a layer with a window, on which no policy acts. Each query sees its window,
  /// however the prompt is appended.
  void attend_windows(std::uint32_t layer, const EvalRows& rows, const GroupMemory& memory,
                      const EvalAttention& attention) {
    const std::size_t layer_key_bytes = rows_ * config_.kv_heads * on_.model.key_bytes();
    for (std::size_t c = 0; c < rows.configs; ++c) {
      std::byte* const heads = memory.whole + c * rows_ * GroupMemory::row_bytes(on_.model);
      cuda::check(
          kernels::prefill_attention(
              on_.model.attention_shape(static_cast<int>(rows_), layer),
              {.queries = static_cast<int>(tokens()),
               .q = heads,
               .keys = attention.keys() + c * layer_key_bytes,
               .values = attention.values() + c * layer_key_bytes,
               .out = heads},  // in place: each thread block reads only the rows that it writes
              static_cast<int>(config_.rows[layer].window), stream()),
          "attention over windows");
    }
  }

  /// Writes queries to memory.heads, and keys and values to the memory from which attention reads
  /// them. They are not rotated yet, except in layers with a window.
  void project(std::uint32_t layer, const GroupMemory& memory, const EvalAttention& attention,
               std::size_t all_rows) {
    const std::size_t head_stride = rows_ * config_.head_size;
    for_each_tile(all_rows, [&](std::size_t first, int rows) {
      kernels::RopeWriteArgs write{};
      if (const RowSpec& row = config_.rows[layer]; row.window > 0) {
        write.rotated = static_cast<int>(row.rope.rotated_dims());
        write.rope = window_rope_.as<float>();
        write.rope_rows = memory.tokens + first;
      }
      write.sequences = memory.configs + first;
      write.slots = memory.tokens + first;
      write.cache.keys = attention.keys();
      write.cache.values = attention.values();
      write.sequence_stride = static_cast<std::int64_t>(head_stride * config_.kv_heads);
      write.head_stride = static_cast<std::int64_t>(head_stride);
      write.q = outputs(memory, first);
      on_.layers.qkv(layer, rows, memory.x + first * config_.hidden,
                     {.qkv = on_.projections.data()}, write);
    });
  }

  void finish(std::uint32_t layer, const GroupMemory& memory, std::size_t all_rows) {
    for_each_tile(all_rows, [&](std::size_t first, int rows) {
      float* const x = memory.x + first * config_.hidden;
      on_.layers.output(layer, rows, x, {.out = outputs(memory, first)});
      on_.layers.gate_up(layer, rows, x);
      on_.layers.down(layer, rows, x);
    });
  }

  std::byte* outputs(const GroupMemory& memory, std::size_t row) const {
    return memory.heads + row * GroupMemory::row_bytes(on_.model);
  }

  /// Copies the shared rows to each configuration: the queries, and the keys and values, which were
  /// written for the first configuration only.
  void share(const EvalRows& rows, const GroupMemory& memory, const EvalAttention& attention) {
    if (rows.shared == 0) return;
    const std::size_t row_pitch = GroupMemory::row_bytes(on_.model),
                      key_pitch = on_.model.key_bytes(),
                      head_stride = rows.config_rows() * key_pitch,
                      config_bytes = head_stride * config_.kv_heads;
    for (std::size_t c = 0; c < rows.configs; ++c) {
      cuda::copy(memory.whole + c * rows.config_rows() * row_pitch, memory.heads,
                 rows.shared * row_pitch, stream());
      if (c == 0) continue;
      for (std::byte* const part : {attention.keys(), attention.values()})
        cuda::copy_rows({part + c * config_bytes, head_stride}, {part, head_stride},
                        rows.shared * key_pitch, config_.kv_heads, stream());
    }
    cuda::copy_rows({memory.whole + rows.shared * row_pitch, rows.config_rows() * row_pitch},
                    {outputs(memory, rows.shared), rows.own * row_pitch}, rows.own * row_pitch,
                    rows.configs, stream());
  }

  /// Copies attention outputs back to the rows from which the products read.
  void gather(const EvalRows& rows, const GroupMemory& memory) {
    if (rows.shared == 0) return;
    const std::size_t row_pitch = GroupMemory::row_bytes(on_.model);
    cuda::copy(memory.heads, memory.whole, rows.shared * row_pitch, stream());
    cuda::copy_rows({outputs(memory, rows.shared), rows.own * row_pitch},
                    {memory.whole + rows.shared * row_pitch, rows.config_rows() * row_pitch},
                    rows.own * row_pitch, rows.configs, stream());
  }

  void score(const GroupMemory& memory, const EvalRows& rows, std::size_t first_config) {
    for (std::size_t first = 0; first < scored(); first += scored_at_once()) {
      const std::size_t count = std::min(scored_at_once(), scored() - first),
                        token = range_.first_scored + first;
      on_.layers.head(full_x_.as<float>() + token * config_.hidden, static_cast<int>(count),
                      full_logits_.as<float>());
      for (std::size_t c = 0; c < rows.configs; ++c) {
        const bool itself = is_yardstick(first_config + c);
        if (first_config + c > 0)
          on_.layers.head(memory.x + rows.row(c, token) * config_.hidden, static_cast<int>(count),
                          logits_.as<float>());
        on_.streams.synchronize();
        const cuda::DeviceBuffer& logits = first_config + c == 0 ? full_logits_ : logits_;
        note_scores(first_config + c, first, count, logits, itself ? logits : full_logits_);
      }
    }
  }
  bool is_yardstick(std::size_t c) const { return c == 0 || !options_.compares_to_first; }

  void note_scores(std::size_t c, std::size_t first, std::size_t count,
                   const cuda::DeviceBuffer& logits, const cuda::DeviceBuffer& baseline) {
    Ids rows(count);
    std::iota(rows.begin(), rows.end(), 0);
    const std::span next = std::span(ids_).subspan(range_.first_scored + first + 1, count);
    for (const RowScore& score : device_scores({.logits = logits.as<float>(),
                                 .baseline = baseline.as<float>(),
                                 .baseline_rows = rows,
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

  DeviceEvaluation& on_;
  const ModelConfig& config_;
  const Ids& ids_;
  const SequenceOptions& options_;
  const ScoredRange range_;
  const std::vector<Segment> segments_;
  const ModelShape shape_;
  const RopeTable angles_;
  const HeadArithmetic arithmetic_;
  const MeasuredQueries every_query_;
  const std::shared_ptr<const OutputProjections> output_;
  const HeadTaskPlan plan_;
  const Tables tables_;
  const std::size_t rows_;  ///< rows of a configuration
  std::size_t shared_ = 0;  ///< rows that all configurations share
  std::vector<ResolvedConfig> resolved_;
  std::vector<const ResolvedConfig*> pointers_;
  cuda::DeviceBuffer device_ids_, full_x_, full_logits_, logits_, window_rope_;
  std::vector<TokenScores> scores_;
};

}  // namespace

std::string beyond_device_layers(const ModelConfig& config) {
  if (config.sinks) return "sink logits";
  return config.query_heads / config.kv_heads > kernels::kMaxReplayGroup
             ? fmt::format("more than {} query heads for a KV head", kernels::kMaxReplayGroup)
             : "";
}

SweepRunner device_layer_sweep_runner(const DeviceModel& model) {
  const auto evaluation = std::make_shared<DeviceEvaluation>(model);
  return [evaluation](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                      const EvalOptions& options) {
    refuse(evaluation->model, configs);
    return run_sequences_in_turn(sequences, options,
                                 [&](const Ids& ids, const SequenceOptions& how) {
                                   return SequenceRun(*evaluation, ids, configs, how).run();
                                 });
  };
}

}  // namespace kvlab
