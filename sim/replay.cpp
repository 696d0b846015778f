#include "sim/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "policies/observation.hpp"
#include "sim/head_run.hpp"
#include "sim/oracle.hpp"
#include "sim/run_heads.hpp"
#include "traces/numeric/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kSampleEvery = 8;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// What a configuration left behind on one KV head.
struct HeadOutcome {
  HeadStats stats;
  std::uint64_t evictions = 0, live_max = 0, live_end = 0;
};

/// One KV head's tensors, read from a trace.
struct HeadTensors {
  std::vector<float> q, k, v;  // [group, token, dim], [token, dim], [token, dim]
  HeadView view;
};

HeadTensors read_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head) {
  const ModelShape& shape = trace.shape();
  const std::size_t head_floats = std::size_t{trace.tokens()} * shape.head_size;
  HeadTensors tensors{std::vector<float>(shape.group() * head_floats),
                      std::vector<float>(head_floats),
                      std::vector<float>(head_floats),
                      {}};
  for (std::uint32_t g = 0; g < shape.group(); ++g)
    trace.read(Part::q, layer, kv_head * shape.group() + g, 0, trace.tokens(),
               tensors.q.data() + g * head_floats);
  trace.read(Part::k, layer, kv_head, 0, trace.tokens(), tensors.k.data());
  trace.read(Part::v, layer, kv_head, 0, trace.tokens(), tensors.v.data());
  tensors.view = {.tokens = trace.tokens(),
                  .group = shape.group(),
                  .head_size = shape.head_size,
                  .q = tensors.q.data(),
                  .q_head_stride = head_floats,
                  .q_token_stride = shape.head_size,
                  .k = tensors.k.data(),
                  .v = tensors.v.data(),
                  .kv_token_stride = shape.head_size};
  return tensors;
}

std::vector<bool> dense_prompt(const std::vector<Segment>& segments, Prefill prefill) {
  std::vector<bool> uncut;
  for (const Segment& s : segments)
    uncut.resize(s.start + s.tokens, s.kind == SegmentKind::prompt && prefill.chunk == 0);
  return uncut;
}

/// One trace through the grid: what all units share.
class Replay {
 public:
  Replay(const TraceReader& trace, std::uint32_t sequence, std::span<const ReplayConfig> configs,
         const ReplayOptions& options)
      : trace_(trace),
        sequence_(sequence),
        configs_(configs),
        options_(options),
        rope_(trace.header().rope, trace.tokens()),
        arithmetic_{.softmax_scale = trace.header().softmax_scale,
                    .rounding = trace.header().rounding == Rounding::model_dtype
                                    ? std::optional(trace.shape().dtype)
                                    : std::nullopt,
                    .threshold16 = request_threshold16(options.threshold)},
        span_(trace.segments(), options.span == Span::decode,
              options.every_output_error ? 1 : kSampleEvery) {
    check();
  }

  const QuerySpan& span() const { return span_; }
  const std::vector<std::uint32_t>& layers() const { return layers_; }
  const std::vector<std::uint32_t>& budgets() const { return budgets_; }

  /// One unit of work: all configurations on one KV head.
  std::vector<HeadOutcome> run_unit(std::uint32_t layer, std::uint32_t kv_head) const {
    const HeadTensors tensors = read_head(trace_, layer, kv_head);
    SharedRows rows(tensors.view, rope_, arithmetic_);
    TopkRun topk(span_, tensors.view.group);
    std::vector<std::unique_ptr<HeadRun>> runs;  // by configuration; null: oracle_topk
    const std::vector<std::uint64_t> future = future_masses(rows);
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      runs.push_back(make_run(c, layer, kv_head, tensors.view, future));
      if (runs.back())
        runs.back()->measure(&span_);
      else
        topk.add(budgets_[c], dense_prompt(trace_.segments(), configs_[c].prefill));
    }
    run_head(trace_.tokens(), rows, runs, &topk);
    return outcomes(runs, topk);
  }

  std::unique_ptr<HeadRun> make_run(std::size_t c, std::uint32_t layer, std::uint32_t kv_head,
                                    const HeadView& view,
                                    const std::vector<std::uint64_t>& future) const {
    const ReplayConfig& config = configs_[c];
    if (config.policy.name == kOracleTopk) return nullptr;
    const LiveSet::Identity identity{config.seed, sequence_, layer, kv_head};
    const auto run = [&](LiveSet live) {
      return std::make_unique<HeadRun>(std::move(live), config.positions, admissions_[c], view,
                                       rope_, arithmetic_);
    };
    if (config.policy.name != kOracleMass)
      return run(LiveSet(config.policy, budgets_[c], identity));
    const auto masses = std::make_shared<std::vector<std::uint64_t>>(future);
    auto oracle = run(LiveSet(std::make_unique<FutureMassStates>(masses), Needs::nothing,
                              budgets_[c], Guards{}, identity));
    oracle->follow_oracle(masses);
    return oracle;
  }

  std::vector<std::uint64_t> future_masses(SharedRows& rows) const {
    const bool wanted = std::any_of(configs_.begin(), configs_.end(), [](const ReplayConfig& c) {
      return c.policy.name == kOracleMass;
    });
    if (!wanted) return {};
    return total_masses(trace_.tokens(), trace_.shape().group(), rows);
  }

  SharedRows shared_rows(const HeadView& view) const { return {view, rope_, arithmetic_}; }

 private:
  void check() {
    if (span_.size() == 0)
      throw std::invalid_argument(fmt::format(
          "trace {}: span decode needs decoded tokens, and it has none; --span all takes "
          "every query",
          trace_.directory().string()));
    layers_ = options_.layers;
    if (layers_.empty()) {
      layers_.resize(trace_.shape().layers);
      std::iota(layers_.begin(), layers_.end(), 0u);
    }
    for (const std::uint32_t layer : layers_)
      if (layer >= trace_.shape().layers)
        throw std::invalid_argument(fmt::format("layer {}: the trace {} has layers 0 to {}", layer,
                                                trace_.directory().string(),
                                                trace_.shape().layers - 1));
    if (!(options_.threshold >= 0 && options_.threshold <= 1))
      throw std::invalid_argument(
          fmt::format("request threshold {}: should be between 0 and 1", options_.threshold));
    for (const ReplayConfig& config : configs_) add(config);
  }

  void add(const ReplayConfig& config) {
    const bool reference = config.policy.entry == nullptr;
    if (reference && config.positions == Positions::cache)
      throw std::invalid_argument(
          fmt::format("policy {}: a reference keeps original positions", config.policy.name));
    const bool evicts = reference || config.policy.entry->info.evicts;
    budgets_.push_back(evicts ? config.budget.resolve(trace_.tokens()) : trace_.tokens());
    if (!reference && evicts) resolve_guards(config.policy, budgets_.back());
    admissions_.push_back(admissions_of(trace_.segments(), config.prefill));
  }

  std::vector<HeadOutcome> outcomes(const std::vector<std::unique_ptr<HeadRun>>& runs,
                                    const TopkRun& topk) const {
    std::vector<HeadOutcome> result;
    auto next_topk = topk.configurations().begin();
    for (const auto& run : runs) {
      if (run)
        result.push_back(
            {run->stats(), run->live().evictions(), run->live().live_max(), run->live().size()});
      else
        result.push_back({(next_topk++)->stats});
    }
    return result;
  }

  const TraceReader& trace_;
  std::uint32_t sequence_;
  std::span<const ReplayConfig> configs_;
  const ReplayOptions& options_;
  RopeTable rope_;
  HeadArithmetic arithmetic_;
  QuerySpan span_;
  std::vector<std::uint32_t> layers_, budgets_;
  std::vector<std::vector<Admission>> admissions_;  // by configuration
};

/// One layer's outcomes, and its errors over concatenated heads.
struct LayerOutcome {
  std::vector<std::vector<HeadOutcome>> heads;  // [kv_head][configuration]
  std::vector<BlockedRatio> error;              // [configuration]
};

/// Sums the squared norms over the heads in order, then drops them.
void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs) {
  layer.error.resize(configs);
  for (std::size_t c = 0; c < configs; ++c) {
    layer.error[c].resize(span.blocks());
    for (std::uint32_t sample = 0; sample < span.samples(); ++sample) {
      double error = 0, output = 0;
      for (const auto& head : layer.heads) {
        error += head[c].stats.error2[sample];
        output += head[c].stats.output2[sample];
      }
      if (output > 0)
        layer.error[c].add(span.block_of_sample(sample), std::sqrt(error / output), 1);
    }
    for (auto& head : layer.heads) {
      head[c].stats.error2 = {};
      head[c].stats.output2 = {};
    }
  }
}

/// Turns outcomes into rows.
class Tabulator {
 public:
  Tabulator(const TraceReader& trace, const QuerySpan& span, const ReplayConfig& config,
            std::size_t c, std::vector<Measurement>& rows)
      : trace_(trace), span_(span), config_(config), c_(c), rows_(rows) {}

  void head(std::int32_t layer, std::int32_t head, const HeadOutcome& outcome) {
    add_rows(layer, head, {&outcome}, {});
  }
  void aggregate(std::int32_t layer, const std::vector<const HeadOutcome*>& outcomes,
                 const std::vector<const BlockedRatio*>& layer_errors) {
    add_rows(layer, -1, outcomes, layer_errors);
  }

 private:
  using Outcomes = std::vector<const HeadOutcome*>;

  void add(std::string metric, double value, double standard_error, std::uint64_t count) {
    rows_.push_back({c_, layer_, head_, std::move(metric), value, standard_error, count});
  }

  void add_mean(const char* metric, const Outcomes& outcomes,
                BlockedRatio HeadStats::PerQueryHead::*ratio, bool count_queries) {
    std::vector<const BlockedRatio*> ratios;
    std::uint64_t filled = 0;
    for (const HeadOutcome* outcome : outcomes)
      for (const HeadStats::PerQueryHead& head : outcome->stats.heads) {
        ratios.push_back(&(head.*ratio));
        filled += (head.*ratio).weight() > 0;
      }
    if (filled == 0) return;
    const Estimate estimate = mean_of(ratios);
    const std::uint64_t count =
        count_queries ? filled * span_.size() : static_cast<std::uint64_t>(estimate.weight);
    add(metric, estimate.value, estimate.standard_error, count);
  }

  void add_rows(std::int32_t layer, std::int32_t head, const Outcomes& outcomes,
                const std::vector<const BlockedRatio*>& layer_errors) {
    layer_ = layer;
    head_ = head;
    using PerQueryHead = HeadStats::PerQueryHead;
    add_mean("recall", outcomes, &PerQueryHead::recall, true);
    add_mean("nll_recall", outcomes, &PerQueryHead::nll, true);
    add_mean("miss_rate", outcomes, &PerQueryHead::miss, true);
    if (config_.policy.name == kOracleTopk) return;
    add_mean("output_error", outcomes, &PerQueryHead::error, false);
    if (!layer_errors.empty()) {
      const Estimate estimate = mean_of(layer_errors);
      if (estimate.weight > 0)
        add("layer_error", estimate.value, estimate.standard_error,
            static_cast<std::uint64_t>(estimate.weight) * trace_.shape().query_heads);
    }
    add_totals(outcomes);
  }

  void add_totals(const Outcomes& outcomes) {
    const ModelShape& shape = trace_.shape();
    std::uint64_t evictions = 0, live_max = 0, live_end = 0, zeros = 0;
    for (const HeadOutcome* outcome : outcomes) {
      evictions += outcome->evictions;
      live_max = std::max(live_max, outcome->live_max);
      live_end += outcome->live_end;
      for (const HeadStats::PerQueryHead& head : outcome->stats.heads) zeros += head.zero_outputs;
    }
    const std::uint64_t kv_bytes = live_end * 2 * shape.head_size * bytes_of(shape.dtype);
    const auto total = [&](const char* metric, std::uint64_t value) {
      add(metric, static_cast<double>(value), kNaN, outcomes.size());
    };
    total("evictions", evictions);
    total("live_max", live_max);
    total("kv_bytes", kv_bytes);
    total("state_bytes", live_end * state_bytes_per_token());
    if (zeros) total("zero_outputs", zeros);
  }

  /// Policy state, position and, where positions are squeezed, rank.
  std::uint64_t state_bytes_per_token() const {
    const std::uint64_t slot = config_.policy.entry ? config_.policy.entry->slot_bytes : 8;
    return slot + 4 + (config_.positions == Positions::cache ? 4 : 0);
  }

  const TraceReader& trace_;
  const QuerySpan& span_;
  const ReplayConfig& config_;
  std::size_t c_;
  std::vector<Measurement>& rows_;
  std::int32_t layer_ = 0, head_ = 0;
};

std::vector<Measurement> tabulate(const TraceReader& trace, const Replay& replay,
                                  std::span<const ReplayConfig> configs,
                                  const std::vector<LayerOutcome>& layers) {
  std::vector<Measurement> rows;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    Tabulator table(trace, replay.span(), configs[c], c, rows);
    std::vector<const HeadOutcome*> all;
    std::vector<const BlockedRatio*> all_errors;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto layer = static_cast<std::int32_t>(replay.layers()[l]);
      std::vector<const HeadOutcome*> heads;
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        heads.push_back(&layers[l].heads[h][c]);
        table.head(layer, static_cast<std::int32_t>(h), *heads.back());
      }
      table.aggregate(layer, heads, {&layers[l].error[c]});
      all.insert(all.end(), heads.begin(), heads.end());
      all_errors.push_back(&layers[l].error[c]);
    }
    table.aggregate(-1, all, all_errors);
  }
  return rows;
}

}  // namespace

std::span<const std::string_view> replay_references() {
  static constexpr std::string_view kReferences[] = {kOracleMass, kOracleTopk};
  return kReferences;
}

ReplayResult replay(const TraceReader& trace, std::uint32_t sequence,
                    std::span<const ReplayConfig> configs, const ReplayOptions& options) {
  const Replay job(trace, sequence, configs, options);
  const std::size_t heads = trace.shape().kv_heads, units = job.layers().size() * heads;
  std::vector<LayerOutcome> layers(job.layers().size());
  for (LayerOutcome& layer : layers) layer.heads.resize(heads);
  std::vector<std::size_t> left(layers.size(), heads);
  std::size_t done = 0;
  std::mutex mutex;
  parallel_for(units, options.threads, [&](std::size_t unit) {
    const std::size_t l = unit / heads, h = unit % heads;
    auto outcome = job.run_unit(job.layers()[l], static_cast<std::uint32_t>(h));
    const std::lock_guard lock(mutex);
    layers[l].heads[h] = std::move(outcome);
    if (--left[l] == 0) reduce_layer(layers[l], job.span(), configs.size());
    if (options.progress)
      options.progress(static_cast<double>(++done) / static_cast<double>(units));
  });
  return {job.budgets(), tabulate(trace, job, configs, layers)};
}

std::vector<KeptSet> kept_sets(const TraceReader& trace, std::uint32_t sequence,
                               const ReplayConfig& config, const ReplayOptions& options,
                               std::uint32_t layer, std::uint32_t kv_head,
                               std::span<const std::uint32_t> queries) {
  if (config.policy.name == kOracleTopk)
    throw std::invalid_argument("oracle_topk keeps a set for each query head, not for a KV head");
  const Replay job(trace, sequence, std::span(&config, 1), options);
  const HeadTensors tensors = read_head(trace, layer, kv_head);
  SharedRows rows = job.shared_rows(tensors.view);
  const std::vector<std::uint64_t> future = job.future_masses(rows);
  std::vector<std::unique_ptr<HeadRun>> runs;
  runs.push_back(job.make_run(0, layer, kv_head, tensors.view, future));
  std::vector<KeptSet> kept;
  runs[0]->watch([&](std::uint32_t query, std::span<const std::uint32_t> live) {
    if (std::binary_search(queries.begin(), queries.end(), query))
      kept.push_back({query, {live.begin(), live.end()}});
  });
  run_head(trace.tokens(), rows, runs, nullptr);
  return kept;
}

}  // namespace kvlab
