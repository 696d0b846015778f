#include "sim/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "policies/executor.hpp"
#include "sim/config_batches/head_config_batches.hpp"
#include "sim/head_replayer.hpp"
#include "sim/oracles/oracle.hpp"
#include "sim/plain_run.hpp"
#include "sim/refetch/belady.hpp"
#include "sim/refetch/lru_curve.hpp"
#include "sim/refetch/refetch_run.hpp"
#include "sim/run/tabulate.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kSampleEvery = 8;

/// The outcomes of a layer whose KV heads evict together, by KV head, then by configuration. The
/// entry of a head is empty before the layer has run. It is empty again after the outcomes of the
/// head have been moved out.
struct LayerOutcomes {
  std::mutex mutex;
  std::vector<std::vector<HeadOutcome>> heads;
};

/// Throws unless each feature of a policy can be computed or is in the trace.
void check_features(const PolicySpec& policy, const TraceReader& trace, bool knows_projections) {
  std::vector<std::string> there;
  for (const TraceExtras::Feature& feature : trace.extras().features) there.push_back(feature.name);
  for (const std::string& name : policy.features) {
    if (is_computed(name, knows_projections) || trace.has_feature(name)) continue;
    if (policy.feature_source && !built_in_feature(name)) continue;
    const std::string what = fmt::format("policy {}: feature {}: ", policy.name, name);
    if (built_in_feature(name))
      throw std::invalid_argument(what + "is computed from the model's weights; give --model DIR");
    throw std::invalid_argument(fmt::format(
        "{}the trace {} has {}; add the feature with python -m kvlab.hf features, or use "
        "one that kvlab computes: {}",
        what, trace.directory().string(),
        there.empty() ? "no features" : fmt::format("only the features {}", fmt::join(there, ", ")),
        computed_feature_names()));
  }
}

/// Throws unless the projections belong to the trace's model.
void check_projections(const OutputProjections& output, const TraceReader& trace) {
  const ModelShape& shape = trace.shape();
  const std::string &given = output.weights_xxh3, &own = trace.header().weights_xxh3;
  const bool other_weights = !given.empty() && !own.empty() && given != own;
  if (other_weights || output.layers.size() != shape.layers || output.group != shape.group() ||
      output.head_size != shape.head_size)
    throw std::invalid_argument(fmt::format(
        "--model: the trace {} was captured from another checkpoint; give that checkpoint",
        trace.directory().string()));
}

/// The trace with only its layers without a sliding window. Policies act only on these layers,
/// because layers with a window keep few tokens anyway.
TraceReader policy_layers(const TraceReader& trace) {
  if (trace.layers_with_window(true).empty()) return trace;
  const std::vector<std::uint32_t> layers = trace.layers_with_window(false);
  if (layers.empty())
    throw std::invalid_argument(
        fmt::format("trace {}: every layer has a sliding window, so policies have nothing to act "
                    "on; give a trace with a layer that attends to all tokens",
                    trace.directory().string()));
  return trace.select_layers(layers);
}

CacheShape heads_of(const TraceReader& trace) {
  const ModelShape& shape = trace.shape();
  return {shape.layers, shape.kv_heads, shape.head_size, {}, shape.numbers};
}

/// The request threshold. It must be the same for all configurations, because requests are counted
/// once for all of them.
double threshold_of(std::span<const CacheConfig> configs) {
  const double threshold = configs.empty() ? CacheConfig{}.threshold : configs.front().threshold;
  for (const CacheConfig& config : configs)
    if (config.threshold != threshold)
      throw std::invalid_argument(
          fmt::format("request threshold {}: another configuration has {}; give all configurations "
                      "of a replay the same threshold",
                      config.threshold, threshold));
  return threshold;
}

/// Says why the configuration cannot be replayed with refetch at any budget; empty if it can.
std::string refetch_obstacle(const CacheConfig& config) {
  const PolicySpec& policy = config.policy;
  const Modifiers& modifiers = policy.modifiers;
  if (!policy.entry && policy.name != kBelady)
    return "with --refetch, evicted tokens return, but this oracle evicts for good; use belady, or "
           "leave the oracle out";
  if (policy.tier_plan.is_quantized() || policy.centre != KeyCentre::none)
    return "--refetch fetches 16-bit tokens; leave --tiers out";
  if (config.positions == Positions::cache)
    return "with --refetch a token returns to its position in the text; use --positions original";
  if (config.evicts_by_layer())
    return "--refetch chooses victims by KV head; leave scope=layer and ada() out";
  if (modifiers.every != 1 || modifiers.once)
    return "--refetch evicts whenever it needs a slot; leave every= and once out";
  return "";
}

/// Says why the policy cannot be replayed on a trace that has only selections; empty if it can.
std::string needs_beyond_selections(const PolicySpec& policy, const TraceReader& trace) {
  constexpr std::string_view kInstead =
      "such as lru, clock or sieve, or a trace with queries, keys and values";
  if (!policy.entry) return "";
  if (needs_mass(policy.entry->info.needs) || policy.entry->observe_heads ||
      policy.entry->see_trace || policy.entry->see_rows)
    return fmt::format(
        "it needs attention, and {} has only selections; use a policy that needs "
        "none, {}",
        trace.directory().string(), kInstead);
  for (const std::string& name : policy.features)
    if (!trace.has_feature(name) || is_computed(name, true))
      return fmt::format(
          "it needs {}, which is computed from keys and values, and {} has only "
          "selections; use a policy that needs none, {}",
          name, trace.directory().string(), kInstead);
  return "";
}

/// Throws unless every measured query is appended alone. With refetch, this is necessary because
/// each query fetches its tokens before it attends.
void check_appends(const ResolvedConfig& config, const MeasuredQueries& selecting) {
  for (const Append& append : config.appends)
    for (std::uint32_t i = 0; append.tokens > 1 && i < append.tokens; ++i)
      if (selecting.contains(append.first + i))
        throw std::invalid_argument(
            "--queries all: with --refetch, every measured query has to be a separate step; use "
            "--prefill stream, or --queries decode");
}

/// The data that all head tasks of a replay share: one trace and the configurations.
class Replay {
 public:
  Replay(const TraceReader& trace, std::uint32_t sequence, std::span<const CacheConfig> configs,
         const ReplayOptions& options)
      : trace_(policy_layers(trace)),
        sequence_(sequence),
        options_(options),
        ropes_(trace_),
        measured_(trace.segments(), options.queries, options.every_output_error ? 1 : kSampleEvery,
                  trace.header().passages),
        by_layer_(trace_.shape().layers) {
    for (std::uint32_t layer = 0; layer < shape().layers; ++layer)
      arithmetics_.push_back(arithmetic_of(trace_, layer, threshold_of(configs)));
    check();
    for (const CacheConfig& config : configs) add(config);
  }

  /// The shape of the model with only the layers on which policies act.
  const ModelShape& shape() const { return trace_.shape(); }
  const MeasuredQueries& measured() const { return measured_; }
  const std::vector<std::uint32_t>& layers() const { return layers_; }
  std::size_t trace_tokens() const { return trace_.tokens(); }
  std::span<const ResolvedConfig> configs() const { return configs_; }
  ProjectionColumns columns() const { return projection_columns(trace_, options_.queries); }
  unsigned threads() const { return options_.threads; }
  /// Whether queries attend. If not, the trace has only selections.
  bool has_attention() const { return trace_.has_tensors(); }
  LayerFacts facts(std::uint32_t layer) const { return {columns(), residual_norms(layer)}; }
  /// Squared norms of the residual stream at the sampled queries; empty if the trace has none.
  std::vector<float> residual_norms(std::uint32_t layer) const {
    if (!trace_.has_residuals()) return {};
    std::vector<float> all(trace_.tokens()), sampled;
    trace_.residual_norm2(layer, all.data());
    for (const std::uint32_t query : measured_.sampled_queries()) sampled.push_back(all[query]);
    return sampled;
  }
  /// The budget of each configuration in tokens. For a policy that does not evict, it is the
  /// trace's length.
  std::vector<std::uint32_t> budgets() const {
    std::vector<std::uint32_t> tokens;
    for (const ResolvedConfig& config : configs_)
      tokens.push_back(config.evicts() ? config.requested_tokens : trace_.tokens());
    return tokens;
  }

  /// Runs one head task: all configurations on one KV head.
  std::vector<HeadOutcome> run_task(HeadTask task) const {
    std::vector<std::size_t> all(configs_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    std::vector<HeadOutcome> outcomes(configs_.size());
    run_here(all, task, outcomes);
    return outcomes;
  }

  /// Runs several head tasks. options.elsewhere runs the configurations that it supports; the CPU
  /// runs the others.
  std::vector<std::vector<HeadOutcome>> run_tasks(std::span<const HeadTask> tasks) const {
    std::vector<std::size_t> there, here;
    for (std::size_t c = 0; c < configs_.size(); ++c)
      (goes_elsewhere(c) ? there : here).push_back(c);
    std::vector<std::vector<HeadOutcome>> outcomes(tasks.size());
    for (auto& task_outcomes : outcomes) task_outcomes.resize(configs_.size());
    if (!there.empty()) {
      auto own = options_.elsewhere->run(plan_for(there), tasks);
      for (std::size_t u = 0; u < tasks.size(); ++u)
        for (std::size_t i = 0; i < there.size(); ++i) outcomes[u][there[i]] = std::move(own[u][i]);
    }
    if (!here.empty())
      parallel_for(tasks.size(), options_.threads,
                   [&](std::size_t u) { run_here(here, tasks[u], outcomes[u]); });
    return outcomes;
  }

  bool goes_elsewhere(std::size_t c) const {
    const PolicyEntry* entry = configs_[c].policy.entry.get();
    const bool only_here = entry && entry->host;
    return options_.elsewhere && !only_here && options_.elsewhere->takes(trace_, configs_[c]);
  }

  ReplayPlan plan_for(std::span<const std::size_t> which) const {
    ReplayPlan plan{trace_,    sequence_,        ropes_, arithmetics_,
                    measured_, options_.threads, {},     options_.output.get()};
    for (const std::size_t c : which) plan.configs.push_back(&configs_[c]);
    return plan;
  }

  static bool evicts_by_layer(const ResolvedConfig& config, std::uint32_t layer) {
    return config.evicts_by_layer() && !config.exempts(layer);
  }
  /// Whether the configuration runs without configuration batches, one live set at a time.
  bool runs_plainly(const CacheConfig& config, std::uint32_t layer) const {
    return options_.plain || config.policy.name == kOracleResidual ||
           config.policy.tier_plan.is_kivi() || config.policy.centre != KeyCentre::none ||
           !trace_.row(layer).is_plain() ||
           (config.policy.entry && config.policy.entry->observe_heads);
  }
  /// The identity has the layer's number in the model, because random samples depend on the
  /// identity and must not change if other layers are left out.
  LiveSet::Identity identity(std::uint32_t layer, std::uint32_t kv_head) const {
    return {0, sequence_, shape().number(layer), kv_head};
  }

  /// Reads a KV head's tensors, and the token features that the configurations need.
  HeadTensors read(std::uint32_t layer, std::uint32_t kv_head) const {
    const OutputProjections* const output = options_.output.get();
    auto feature_values = std::make_unique<FeaturesByName>();
    for (const ResolvedConfig& config : configs_) {
      add_supplied_features(config, layer, kv_head, trace_.tokens(), *feature_values);
      add_trace_features(trace_, layer, kv_head, config.policy.features, output, *feature_values);
    }
    std::unique_ptr<const ErrorProjection> projection;
    if (columns().any())
      projection =
          std::make_unique<const ErrorProjection>(trace_, layer, kv_head, options_.queries);
    HeadTensors tensors =
        has_attention() ? read_head(trace_, layer, kv_head) : shape_of_head(trace_);
    tensors.feature_values = std::move(feature_values);
    tensors.projection = std::move(projection);
    tensors.view.projection = tensors.projection.get();
    tensors.view.output = weights_of(output, layer, kv_head);
    tensors.view.feature_values = tensors.feature_values.get();
    return tensors;
  }

  /// Runs some configurations of one head task on this thread.
  void run_here(std::span<const std::size_t> which, HeadTask task,
                std::vector<HeadOutcome>& outcomes) const {
    const auto [layer, kv_head] = task;
    if (options_.refetch) {
      const HeadTensors tensors = read(layer, kv_head);
      auto own = run_with_refetch(which, task, tensors.view, &measured_, {});
      for (std::size_t i = 0; i < which.size(); ++i) outcomes[which[i]] = std::move(own[i]);
      return;
    }
    // by_layer[0] runs in configuration batches, by_layer[1] without them.
    std::vector<std::size_t> by_layer[2], topk, plainly, batched;
    for (const std::size_t c : which)
      (evicts_by_layer(configs_[c], layer)      ? by_layer[runs_plainly(configs_[c], layer)]
       : !runs_plainly(configs_[c], layer)      ? batched
       : configs_[c].policy.name == kOracleTopk ? topk
                                                : plainly)
          .push_back(c);
    for (const auto& alike : by_layer)
      if (!alike.empty()) take_from_layer(alike, task, outcomes);
    if (topk.empty() && plainly.empty() && batched.empty()) return;
    const HeadTensors tensors = read(layer, kv_head);
    for (const std::size_t c : topk)
      outcomes[c] = {
          topk_stats(measured_, tensors.view, {tensors.view, ropes_[layer], arithmetics_[layer]},
                     configs_[c].budget_of(layer, kv_head), configs_[c].in_dense_prompt)};
    if (!plainly.empty()) {
      auto own = run_plainly(plainly, {layer, kv_head}, {&tensors.view, 1}, &measured_, 0, {});
      for (std::size_t i = 0; i < plainly.size(); ++i)
        outcomes[plainly[i]] = std::move(own.front()[i]);
    }
    if (!batched.empty()) run_config_batches(batched, layer, kv_head, tensors.view, outcomes);
  }

  /// Runs one layer through configurations whose caches evict together. All of them must run in
  /// configuration batches, or all without. Returns outcomes by KV head, then by configuration. If
  /// `measured` is null, nothing is measured. If `keep` is not empty, it is called for each query
  /// with the tokens that the first configuration keeps on KV head `kept_head`.
  using KeepSet = std::function<void(std::uint32_t, std::span<const std::uint32_t>)>;
  std::vector<std::vector<HeadOutcome>> run_layer_together(std::span<const std::size_t> which,
                                                           std::uint32_t layer,
                                                           const MeasuredQueries* measured,
                                                           std::uint32_t kept_head,
                                                           const KeepSet& keep) const {
    std::vector<HeadTensors> tensors;
    std::vector<HeadView> views;
    for (std::uint32_t h = 0; h < trace_.shape().kv_heads; ++h) {
      tensors.push_back(read(layer, h));
      views.push_back(tensors.back().view);
    }
    if (runs_plainly(configs_[which.front()], layer))
      return run_plainly(which, {layer, 0}, views, measured, kept_head, keep);
    const auto own = configs_of_head(which, layer, 0);  // all heads of a layer have the same budget
    BatchedConfigs configs;
    for (const auto& config : own) configs.push_back(config.get());
    LayerConfigBatches config_batches(configs, identity(layer, 0), views, ropes_[layer],
                                      arithmetics_[layer], measured);
    if (keep)
      config_batches.watch(kept_head,
                           [&](std::size_t, std::uint32_t query, auto live) { keep(query, live); });
    config_batches.run();
    return config_batches.outcomes();
  }

  /// Runs some configurations of one head task with refetch. The other arguments are those of
  /// run_layer_together().
  std::vector<HeadOutcome> run_with_refetch(std::span<const std::size_t> which, HeadTask task,
                                            const HeadView& view, const MeasuredQueries* measured,
                                            const KeepSet& keep) const {
    const auto [layer, kv_head] = task;
    std::optional<SharedRows> attention;
    if (has_attention()) attention.emplace(view, ropes_[layer], arithmetics_[layer]);
    SharedRows* const rows = attention ? &*attention : nullptr;
    const Selection selection = options_.refetch->kind == Selector::Kind::logged
                                    ? logged_selections(trace_, layer, kv_head, measured_, rows)
                                    : select_tokens(*options_.refetch, view, ropes_[layer],
                                                    arithmetics_[layer], measured_, *rows);
    BeladyOracle oracle(selection);
    std::vector<ResolvedConfig> configs;
    for (const std::size_t c : which) configs.push_back(configs_[c].head_config(layer, kv_head));
    std::vector<std::unique_ptr<RefetchRun>> runs;
    for (const ResolvedConfig& config : configs) {
      const auto identity = config.identity(layer, kv_head);
      ResidentSet set = config.policy.entry ? ResidentSet(config.policy, config.budget_tokens,
                                                          config.protected_tokens, identity)
                                            : ResidentSet(oracle, config.budget_tokens, identity);
      runs.push_back(std::make_unique<RefetchRun>(std::move(set), config, selection, view,
                                                  arithmetics_[layer].threshold16, measured_,
                                                  measured));
      if (keep) runs.back()->watch(keep);
    }
    kvlab::run_with_refetch(trace_.tokens(), rows, runs);
    std::vector<HeadOutcome> outcomes;
    for (const auto& run : runs) outcomes.push_back(run->outcome());
    if (measured && !outcomes.empty())
      outcomes.front().lru_fetches = lru_fetches_of(task, selection, view, rows);
    return outcomes;
  }

  /// lru_fetches() of a KV head; empty if a prompt follows decoded tokens.
  std::vector<std::uint64_t> lru_fetches_of(HeadTask task, const Selection& selection,
                                            const HeadView& view, SharedRows* rows) const {
    std::uint32_t first = 0;
    while (!measured_.contains(first)) ++first;
    if (trace_.tokens() - first != measured_.size()) return {};
    const CacheConfig lru{.policy = parse_policy("lru")};
    const ResolvedConfig config = resolve(lru, trace_.segments(), sequence_, heads_of(trace_));
    std::vector<std::unique_ptr<RefetchRun>> run;
    run.push_back(std::make_unique<RefetchRun>(
        ResidentSet(config.policy, kNoBudget, {}, config.identity(task.layer, task.kv_head)),
        config, selection, view, arithmetics_[task.layer].threshold16, measured_, nullptr));
    kvlab::run_with_refetch(first, rows, run);
    return lru_fetches(selection, run.front()->set().eviction_order(first));
  }

  /// Does what run_layer_together() does, without configuration batches, for the KV heads of
  /// `views`. `first`: the head task of views[0].
  std::vector<std::vector<HeadOutcome>> run_plainly(std::span<const std::size_t> which,
                                                    HeadTask first, std::span<const HeadView> views,
                                                    const MeasuredQueries* measured,
                                                    std::uint32_t kept_head,
                                                    const KeepSet& keep) const {
    std::vector<SharedRows> rows;
    for (const HeadView& view : views)
      rows.emplace_back(view, ropes_[first.layer], arithmetics_[first.layer]);
    std::vector<LayerRun> runs(which.size());
    for (std::size_t i = 0; i < which.size(); ++i)
      for (std::uint32_t h = 0; h < views.size(); ++h) {
        runs[i].push_back(make_run(which[i], first.layer, first.kv_head + h, views[h]));
        if (measured) runs[i].back()->measure(measured);
        if (keep && first.kv_head + h == kept_head) runs[i].back()->watch(keep);
      }
    run_layer({0, trace_.tokens()}, rows, runs);
    std::vector<std::vector<HeadOutcome>> outcomes(views.size());
    for (const LayerRun& run : runs)
      for (std::uint32_t h = 0; h < views.size(); ++h) outcomes[h].push_back(run[h]->outcome());
    return outcomes;
  }

  /// `configs` must come from configs_of_head(), so that the configurations have the budgets of
  /// this head.
  HeadConfigBatches make_config_batches(
      const std::vector<std::shared_ptr<const ResolvedConfig>>& configs, std::uint32_t layer,
      std::uint32_t kv_head, const HeadView& view, const MeasuredQueries* measured) const {
    BatchedConfigs config_batches;
    for (const auto& config : configs) config_batches.push_back(config.get());
    return {std::move(config_batches),
            identity(layer, kv_head),
            view,
            ropes_[layer],
            arithmetics_[layer],
            measured};
  }

  /// The configurations `which`, with the budgets that they have on this head.
  std::vector<std::shared_ptr<const ResolvedConfig>> configs_of_head(
      std::span<const std::size_t> which, std::uint32_t layer, std::uint32_t kv_head) const {
    std::vector<std::shared_ptr<const ResolvedConfig>> configs;
    for (const std::size_t c : which)
      if (!configs_[c].differs_by_head())
        configs.emplace_back(std::shared_ptr<void>(), &configs_[c]);
      else
        configs.push_back(
            std::make_shared<const ResolvedConfig>(configs_[c].head_config(layer, kv_head)));
    return configs;
  }

  std::unique_ptr<PlainRun> make_run(std::size_t c, std::uint32_t layer, std::uint32_t kv_head,
                                     const HeadView& view) const {
    const ResolvedConfig& config = configs_[c];
    const auto run = [&](LiveSet live) {
      return std::make_unique<PlainRun>(std::move(live), config.positions_of(layer), config.appends,
                                        view, ropes_[layer], arithmetics_[layer]);
    };
    if (config.policy.entry) return run(config.live_set(layer, kv_head));
    const std::shared_ptr<Oracle> oracle = make_oracle(config.policy.name, layer, kv_head, view);
    auto follower =
        run(LiveSet(oracle_ops(), oracle_params(*oracle), config.budget_of(layer, kv_head),
                    ProtectedTokens{}, config.identity(layer, kv_head)));
    follower->keep(oracle);
    return follower;
  }

  std::shared_ptr<Oracle> make_oracle(std::string_view name, std::uint32_t layer,
                                      std::uint32_t kv_head, const HeadView& view) const {
    SharedRows rows(view, ropes_[layer], arithmetics_[layer]);
    if (name == kOracleAttention) return std::make_shared<AttentionOracle>(view, std::move(rows));
    std::vector<float> norm2(trace_.tokens());
    trace_.residual_norm2(layer, norm2.data());
    return std::make_shared<ResidualOracle>(
        view, rows, trace_.sketch(layer, kv_head, ResidualOracle::kColumns), std::move(norm2));
  }

  /// The index of the layer that has this number in the model.
  std::uint32_t layer_of(std::uint32_t number) const {
    const std::uint32_t layer = shape().layer_of(number);
    if (layer == shape().layers)
      throw std::invalid_argument(fmt::format("layer {}: the trace {} has layers {}{}", number,
                                              trace_.directory().string(), shape().numbers_text(),
                                              shape().numbers.empty() ? "" : " without a window"));
    return layer;
  }

 private:
  /// The first head task of a layer that is run computes the outcomes of the whole layer. The other
  /// head tasks of the layer take their outcomes from these results.
  void take_from_layer(std::span<const std::size_t> which, HeadTask task,
                       std::vector<HeadOutcome>& outcomes) const {
    LayerOutcomes& layer = by_layer_[task.layer][runs_plainly(configs_[which.front()], task.layer)];
    const std::lock_guard lock(layer.mutex);
    layer.heads.resize(trace_.shape().kv_heads);
    if (layer.heads[task.kv_head].empty())
      layer.heads = run_layer_together(which, task.layer, &measured_, 0, {});
    auto own = std::exchange(layer.heads[task.kv_head], {});
    for (std::size_t i = 0; i < which.size(); ++i) outcomes[which[i]] = std::move(own[i]);
  }

  void run_config_batches(std::span<const std::size_t> which, std::uint32_t layer,
                          std::uint32_t kv_head, const HeadView& view,
                          std::vector<HeadOutcome>& outcomes) const {
    const auto configs = configs_of_head(which, layer, kv_head);
    HeadConfigBatches config_batches =
        make_config_batches(configs, layer, kv_head, view, &measured_);
    config_batches.run();
    std::vector<HeadOutcome> own = config_batches.outcomes();
    for (std::size_t i = 0; i < which.size(); ++i) outcomes[which[i]] = std::move(own[i]);
  }

  void check() {
    if (measured_.size() == 0)
      throw std::invalid_argument(fmt::format(
          "trace {}: it has no decoded tokens, which --queries decode measures; use --queries all",
          trace_.directory().string()));
    if (options_.output) check_projections(*options_.output, trace_);
    check_selections(options_.refetch, options_.queries, trace_);
    if (options_.refetch && options_.elsewhere) throw std::invalid_argument(cpu_only("--refetch"));
    for (const std::uint32_t number : options_.layers) layers_.push_back(layer_of(number));
    if (layers_.empty()) {
      layers_.resize(shape().layers);
      std::iota(layers_.begin(), layers_.end(), 0u);
    }
  }

  void add(const CacheConfig& config) {
    if (!config.policy.entry && config.positions == Positions::cache)
      throw std::invalid_argument(
          fmt::format("policy {}: an oracle supports original positions only", config.policy.name));
    if (config.policy.name == kOracleResidual && !(trace_.has_residuals() && trace_.sketch_file()))
      throw std::invalid_argument(
          fmt::format("policy oracle_residual: the trace {} lacks residual norms or a sketch; "
                      "`kvlab capture` writes both",
                      trace_.directory().string()));
    check_refetch(options_.refetch, config, trace_);
    check_features(config.policy, trace_, options_.output != nullptr);
    const CacheShape heads = heads_of(trace_);
    configs_.push_back(resolve(config, trace_.segments(), sequence_, heads));
    configs_.back().layer_numbers = shape().numbers;
    if (options_.refetch) check_appends(configs_.back(), measured_);
    find_features(configs_.back(), std::span(trace_.ids()).first(trace_.prompt_tokens()), heads);
    if (config.policy.entry && config.policy.entry->see_trace)
      config.policy.entry->see_trace(sequence_, trace_.directory().string());
  }

  const TraceReader trace_;  // has only the layers without a window
  std::uint32_t sequence_;
  std::vector<ResolvedConfig> configs_;
  const ReplayOptions& options_;
  LayerRopes ropes_;
  std::vector<HeadArithmetic> arithmetics_;  // by layer
  MeasuredQueries measured_;
  std::vector<std::uint32_t> layers_;
  // [layer][0: in configuration batches, 1: without them]
  mutable std::vector<std::array<LayerOutcomes, 2>> by_layer_;
};

}  // namespace

std::span<const std::string_view> replay_oracles() {
  static constexpr std::string_view kOracles[] = {kOracleAttention, kOracleTopk, kOracleResidual,
                                                  kBelady};
  return kOracles;
}

bool is_oracle(std::string_view policy) {
  return std::ranges::find(replay_oracles(), policy) != replay_oracles().end();
}

struct ReplayJob::Impl {
  Replay replay;
  std::size_t heads, configs;
};

ReplayJob::ReplayJob(const TraceReader& trace, std::uint32_t sequence,
                     std::span<const CacheConfig> configs, const ReplayOptions& options)
    : impl_(new Impl{Replay(trace, sequence, configs, options), trace.shape().kv_heads,
                     configs.size()}) {}

ReplayJob::ReplayJob(ReplayJob&&) noexcept = default;
ReplayJob::~ReplayJob() = default;

std::size_t ReplayJob::tasks() const { return impl_->replay.layers().size() * impl_->heads; }

HeadTask ReplayJob::task(std::size_t index) const {
  return {impl_->replay.layers()[index / impl_->heads],
          static_cast<std::uint32_t>(index % impl_->heads)};
}

std::vector<HeadOutcome> ReplayJob::run(std::size_t index) const {
  return impl_->replay.run_task(task(index));
}

std::vector<std::vector<HeadOutcome>> ReplayJob::run_together(
    std::span<const std::size_t> indices) const {
  std::vector<HeadTask> wanted;
  for (const std::size_t index : indices) wanted.push_back(task(index));
  return impl_->replay.run_tasks(wanted);
}

ReplayGathering::ReplayGathering(const ReplayJob& job)
    : job_(*job.impl_),
      layers_(job_.replay.layers().size()),
      left_(layers_.size(), job_.heads),
      joint_(std::make_unique<JointChanges>(job_.configs)) {
  for (LayerOutcome& layer : layers_) layer.heads.resize(job_.heads);
}

ReplayGathering::~ReplayGathering() = default;

void ReplayGathering::put(std::size_t index, std::vector<HeadOutcome> outcomes) {
  const auto fits = [&](const HeadOutcome& outcome) {
    return outcome.stats.fits(job_.replay.measured(), job_.replay.shape().group(),
                              job_.replay.columns());
  };
  if (outcomes.size() != job_.configs || !std::all_of(outcomes.begin(), outcomes.end(), fits))
    throw std::runtime_error("the outcomes belong to another replay");
  if (!outcomes.empty()) {
    const std::vector<std::uint64_t>& own = outcomes.front().lru_fetches;
    if (!own.empty() && own.size() != job_.replay.trace_tokens() + 1)
      throw std::runtime_error("the outcomes belong to another replay");
    lru_fetches_.resize(own.size());
    for (std::size_t budget = 0; budget < own.size(); ++budget) lru_fetches_[budget] += own[budget];
  }
  const std::size_t l = index / job_.heads;
  layers_[l].heads[index % job_.heads] = std::move(outcomes);
  if (--left_[l] > 0) return;
  reduce_layer(layers_[l], job_.replay.measured(), job_.configs,
               job_.replay.facts(job_.replay.layers()[l]), job_.replay.threads());
  for (; joined_ < layers_.size() && left_[joined_] == 0; ++joined_) joint_->add(layers_[joined_]);
}

ReplayResult ReplayGathering::result() const {
  const JointEstimates joint =
      joint_->estimates(job_.replay.measured(), job_.replay.columns().gradient_samples);
  return {job_.replay.budgets(),
          tabulate({job_.replay.shape(), job_.replay.measured(), job_.replay.configs(),
                    job_.replay.layers(), layers_, joint, job_.replay.has_attention()}),
          lru_fetches_};
}

ReplayResult replay(const TraceReader& trace, std::uint32_t sequence,
                    std::span<const CacheConfig> configs, const ReplayOptions& options) {
  const ReplayJob job(trace, sequence, configs, options);
  ReplayGathering gathering(job);
  if (options.elsewhere) {
    std::vector<std::size_t> all(job.tasks());
    std::iota(all.begin(), all.end(), std::size_t{0});
    auto outcomes = job.run_together(all);
    for (const std::size_t task : all) gathering.put(task, std::move(outcomes[task]));
    return gathering.result();
  }
  std::size_t done = 0;
  std::mutex mutex;
  parallel_for(job.tasks(), options.threads, [&](std::size_t task) {
    auto outcomes = job.run(task);
    const std::lock_guard lock(mutex);
    gathering.put(task, std::move(outcomes));
    if (options.progress)
      options.progress(static_cast<double>(++done) / static_cast<double>(job.tasks()));
  });
  return gathering.result();
}

std::uint32_t tokens_within(const CacheConfig& config, const TraceReader& trace) {
  const TraceReader own = policy_layers(trace);
  return resolve(config, own.segments(), 0, heads_of(own)).budget_tokens;
}

std::uint32_t max_selected(const Selector& refetch, const TraceReader& trace) {
  return refetch.kind == Selector::Kind::logged ? trace.max_selected() : refetch.tokens;
}

void check_selections(const std::optional<Selector>& refetch, Queries queries,
                      const TraceReader& trace) {
  const std::string directory = trace.directory().string();
  const bool logged = refetch && refetch->kind == Selector::Kind::logged;
  const auto& selections = trace.extras().selections;
  if (!logged && !trace.has_tensors())
    throw std::invalid_argument(fmt::format(
        "trace {}: it has only selections and no queries, keys and values; use --refetch logged",
        directory));
  if (logged && !selections)
    throw std::invalid_argument(
        fmt::format("--refetch logged: the trace {} has no selections; write them with "
                    "kvlab.Trace.from_selections or Trace.add_selections, or use --refetch top:64",
                    directory));
  if (logged && queries == Queries::all && selections->queries == Queries::decode)
    throw std::invalid_argument(
        fmt::format("--queries all: the trace {} has selections of decoded queries only; use "
                    "--queries decode",
                    directory));
}

void check_refetch(const std::optional<Selector>& refetch, const CacheConfig& config,
                   const TraceReader& trace) {
  const std::string policy = fmt::format("policy {}: ", config.policy.name);
  if (!refetch && config.policy.name == kBelady)
    throw std::invalid_argument(policy +
                                "this oracle requires --refetch, such as --refetch top:64");
  if (!refetch) return;
  std::string why = config.evicts() ? refetch_obstacle(config) : "";
  if (why.empty() && !trace.has_tensors()) why = needs_beyond_selections(config.policy, trace);
  if (!why.empty()) throw std::invalid_argument(policy + why);
  if (!config.evicts()) return;
  const TraceReader own = policy_layers(trace);
  const ResolvedConfig resolved = resolve(config, own.segments(), 0, heads_of(own));
  for (std::uint32_t layer = 0; layer < own.shape().layers; ++layer)
    for (std::uint32_t head = 0; head < own.shape().kv_heads && !resolved.exempts(layer); ++head) {
      const ResolvedConfig head_config = resolved.head_config(layer, head);
      const std::uint64_t min_budget = std::uint64_t{max_selected(*refetch, trace)} +
                                       head_config.protected_tokens.sinks +
                                       head_config.protected_tokens.recent + 1;
      if (head_config.budget_tokens < min_budget)
        throw BudgetTooSmall(
            fmt::format("{}budget {} is {} tokens, but --refetch {} needs at least {}, for the "
                        "selected tokens, the protected tokens and the query's own token",
                        policy, config.budget.text(), head_config.budget_tokens, refetch->text,
                        min_budget),
            fmt::format("a budget of {} would fit", min_budget));
    }
}

std::vector<KeptSet> kept_sets(const TraceReader& trace, std::uint32_t sequence,
                               const CacheConfig& config, const ReplayOptions& options,
                               std::uint32_t number, std::uint32_t kv_head,
                               std::span<const std::uint32_t> queries) {
  if (config.policy.name == kOracleTopk)
    throw std::invalid_argument(
        "oracle_topk keeps one set for each query head, not for each KV head");
  const Replay job(trace, sequence, std::span(&config, 1), options);
  const std::uint32_t layer = job.layer_of(number);
  check_head(trace, layer, kv_head);
  std::vector<KeptSet> kept;
  const auto keep = [&](std::uint32_t query, std::span<const std::uint32_t> live) {
    if (std::binary_search(queries.begin(), queries.end(), query))
      kept.push_back({query, {live.begin(), live.end()}});
  };
  const std::size_t only[] = {0};
  if (job.evicts_by_layer(job.configs().front(), layer)) {
    job.run_layer_together(only, layer, nullptr, kv_head, keep);
    return kept;
  }
  const HeadTensors tensors = job.read(layer, kv_head);
  if (options.refetch) {
    job.run_with_refetch(only, {layer, kv_head}, tensors.view, nullptr, keep);
    return kept;
  }
  if (job.runs_plainly(config, layer)) {
    job.run_plainly(only, {layer, kv_head}, {&tensors.view, 1}, nullptr, kv_head, keep);
    return kept;
  }
  const auto own = job.configs_of_head(only, layer, kv_head);
  HeadConfigBatches config_batches =
      job.make_config_batches(own, layer, kv_head, tensors.view, nullptr);
  config_batches.watch([&](std::size_t, std::uint32_t query, auto live) { keep(query, live); });
  config_batches.run();
  return kept;
}

}  // namespace kvlab
