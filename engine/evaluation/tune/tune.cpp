#include "engine/evaluation/tune/tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>

#include "engine/evaluation/fidelity/fidelity.hpp"
#include "sim/head_view.hpp"
#include "sim/plan/centre_file.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/run/results.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"
#include "traces/base/work_plan.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kSinks[] = {0, 4};
constexpr std::uint32_t kRecent[] = {25, 50, 75, 90};  // percent

std::vector<Extent> recent_of(const PolicyInfo& info) {
  std::vector<Extent> values;
  if (info.recent == Extent{} || info.oldest_first) values.push_back(info.recent);
  if (info.oldest_first)
    return values;  // `recent` makes no difference, because the oldest token
                    // is evicted first
  for (const std::uint32_t share : kRecent) values.push_back(percent(share));
  if (std::ranges::find(values, info.recent) == values.end()) values.push_back(info.recent);
  return values;
}

std::vector<Extent> sinks_of(const PolicyInfo& info) {
  std::vector<Extent> values;
  for (const std::uint32_t count : kSinks) values.push_back(tokens(count));
  if (std::ranges::find(values, info.sinks) == values.end()) values.push_back(info.sinks);
  return values;
}

/// The requested parameters, then variants that change one of them.
std::vector<std::vector<double>> parameters_of(const PolicySpec& spec) {
  std::vector<std::vector<double>> all{spec.params};
  for (std::size_t i = 0; i < spec.params.size(); ++i) {
    const auto& param = spec.entry->params[i];
    for (const double value : parameter_values(param.standard, param.min_value, param.max_value)) {
      if (value == spec.params[i]) continue;
      all.push_back(spec.params);
      all.back()[i] = value;
    }
  }
  return all;
}

bool fits(const PolicySpec& spec, std::uint32_t budget_tokens) {
  try {
    resolve_protected_tokens(spec, budget_tokens);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

using nlohmann::json;

constexpr std::size_t kMaxFinalists = 48;

/// The phases of the work: two for each text, then successive halving, then task accuracy.
enum Kind { kCapture, kReplay, kHalving, kTaskAccuracy };

std::uint32_t common_budget(const TuneRequest& request, std::uint32_t head_size) {
  const CacheConfig& config = request.sweep.front();
  const Budget& budget = config.budget;
  const auto tokens_in = [&](const EvalText& text) {
    return config.budget_in_tokens(static_cast<std::uint32_t>(text.ids.size()), head_size);
  };
  const std::uint32_t first = tokens_in(request.texts.front());
  for (const EvalText& text : request.texts)
    if (tokens_in(text) != first)
      throw std::invalid_argument(fmt::format(
          "--budget: {} is {} tokens for text {} but {} tokens for {}; give a number of tokens",
          budget.text(), first, request.texts.front().name, tokens_in(text), text.name));
  return first;
}

WorkPlan plan_of(const SweepRunner& run_sweep, const TuneRequest& request,
                 const HalvingInput& field) {
  std::vector<WorkPhase> phases;
  for (const EvalText& text : request.texts) {
    const auto tokens = static_cast<double>(text.ids.size());
    phases.push_back({kCapture, text.trace ? 0 : tokens});
    phases.push_back({kReplay, tokens * static_cast<double>(request.sweep.size())});
  }
  const std::size_t first_round = first_round_size(field);
  phases.push_back({kHalving, work_from(field, 0, first_round)});
  phases.push_back({kTaskAccuracy, task_accuracy_work(std::min(first_round, kMaxFinalists),
                                                      request.task_accuracy)});
  // A replay takes a small share of the end-to-end evaluation's time. 1/20 is a first estimate,
  // which is corrected when the first text has been replayed.
  const double rate = end_to_end_rate(run_sweep, request.texts.front(), request.threads);
  return {request.progress, std::move(phases), {rate, rate / 20, rate, request.task_accuracy.rate}};
}

/// The memory of a configuration over the first text. The budget is the same for all texts.
Memory memory_of(const CacheConfig& config, const TuneRequest& request, const ModelConfig& model) {
  const EvalText& text = request.texts.front();
  const auto segments =
      segments_of(static_cast<std::uint32_t>(text.ids.size()), text.prompt_tokens);
  return kvlab::memory_of(resolve(config, segments, 0, model.heads()), model.heads());
}

/// Replays every text and returns its metrics. Temporary traces are deleted immediately.
std::vector<ReplayMetrics> offline_replay(Backend& backend, const OutputSketch& sketch,
                                          const TuneRequest& request, WorkPlan& plan) {
  std::vector<ReplayMetrics> replay_metrics;
  for (std::size_t t = 0; t < request.texts.size(); ++t) {
    const TemporaryFolder scratch;
    replay_metrics.push_back(run_offline_replay(backend, request.texts[t], request.sweep,
                                                {.sketch = sketch,
                                                 .capture = scratch / "trace",
                                                 .every_output_error = request.every_output_error,
                                                 .threads = request.threads,
                                                 .device = request.device,
                                                 .capturing = plan.phase(2 * t + kCapture),
                                                 .progress = plan.phase(2 * t + kReplay)}));
  }
  return replay_metrics;
}

/// The mean of a metric over texts, with the sign changed if needed so that lower is better.
std::vector<double> cost_of(const std::vector<ReplayMetrics>& replay_metrics,
                            const std::string& metric, std::size_t configs) {
  const MetricInfo* const info = find_metric(metric);
  std::vector<double> cost(configs);
  for (const ReplayMetrics& text : replay_metrics) {
    const auto found = text.find(metric);
    if (!info || found == text.end())
      throw std::invalid_argument(fmt::format(
          "--metric: '{}' is not a metric that the replay of every text gives", metric));
    for (std::size_t c = 0; c < configs; ++c)
      cost[c] += (info->higher_is_better ? -1 : 1) * found->second[c] /
                 static_cast<double>(replay_metrics.size());
  }
  for (double& value : cost)  // configurations without the metric come last
    if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  return cost;
}

bool is_as_registered(const PolicySpec& policy) {
  const PolicyInfo& info = policy.entry->info;
  return policy.sinks == info.sinks && policy.recent == info.recent &&
         std::ranges::equal(policy.params, policy.entry->params, {}, {}, &ParamInfo::standard);
}

/// The order of the sweep. The best variant of each policy and each policy's defaults come first,
/// so that the work limit drops no policy entirely. Then come all others, ordered by the metric.
std::vector<std::size_t> order_of(const TuneRequest& request, const std::vector<double>& cost) {
  std::vector<std::size_t> order(request.sweep.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t c) { return cost[c]; });
  std::set<std::string> seen;
  std::stable_partition(order.begin(), order.end(), [&](std::size_t c) {
    const PolicySpec& policy = request.sweep[c].policy;
    return seen.insert(policy.name).second || is_as_registered(policy);
  });
  return order;
}

TuneScore score_on(std::size_t text, const TokenScores& scores) {
  const auto same = std::accumulate(scores.same_first.begin(), scores.same_first.end(), 0.0);
  return {.text = text,
          .tokens = scores.nll.size(),
          .kl = spread_of(scores.kl).mean,
          .nll = spread_of(scores.nll).mean,
          .same_first = same / static_cast<double>(scores.nll.size())};
}

HalvingInput field_of(const TuneRequest& request) {
  HalvingInput field{.configurations = request.sweep.size(), .share = request.share};
  for (const EvalText& text : request.texts) field.lengths.push_back(text.ids.size());
  return field;
}

Halving halving(const SweepRunner& run_sweep, const TuneRequest& request, const HalvingInput& field,
                WorkPlan& plan, Tuning& tuning) {
  const std::size_t phase = 2 * request.texts.size();
  double done = 0;
  return successive_halving(field, [&](std::size_t text,
                                       std::span<const std::size_t> configurations) {
    std::vector<CacheConfig> configs;
    for (const std::size_t configuration : configurations)
      configs.push_back(request.sweep[tuning.order[configuration]]);
    const double own = static_cast<double>(field.lengths[text] * (configurations.size() + 1));
    const double all = done + work_from(field, text, configurations.size());
    plan.set_work(phase, all);
    const auto show = [&, halving = plan.phase(phase)](double part) {
      halving((done + part * own) / all);
    };
    auto scores = end_to_end_scores(run_sweep, request.texts[text], configs, request.threads, show);
    tuning.scores[request.sweep.size()].push_back(score_on(text, scores[0]));
    for (std::size_t i = 0; i < configurations.size(); ++i)
      tuning.scores[tuning.order[configurations[i]]].push_back(score_on(text, scores[i + 1]));
    done += own;
    return kl_of(std::move(scores));
  });
}

/// The mean over texts, each of weight 1, as in PairedScores.
template <class Value>
double mean_over(std::span<const TuneScore> scores, Value value) {
  double sum = 0;
  for (const TuneScore& score : scores) sum += std::invoke(value, score);
  return sum / static_cast<double>(scores.size());
}

/// KL of a configuration divided by the winner's KL, over the texts that both ran. The winner ran
/// all texts of a configuration that was eliminated, and further texts after these.
double kl_over_winner(const Tuning& tuning, std::size_t config, std::size_t winner) {
  const std::vector<TuneScore>&own = tuning.scores[config], &first = tuning.scores[winner];
  return mean_over(own, &TuneScore::kl) /
         mean_over(std::span(first).first(own.size()), &TuneScore::kl);
}

/// The finalists: first `winner`, the choice by KL, then the others by ascending KL. The others are
/// the best configuration of every other policy, so that each policy's task accuracy is known, and
/// up to kMaxFinalists more with the lowest KL.
std::vector<std::size_t> finalists_of(const Tuning& tuning, const TuneRequest& request,
                                      std::size_t winner) {
  std::vector<std::size_t> evaluated;
  for (std::size_t c = 0; c < request.sweep.size(); ++c)
    if (!tuning.scores[c].empty() && c != winner) evaluated.push_back(c);
  const auto cost = [&](std::size_t c) { return kl_over_winner(tuning, c, winner); };
  std::ranges::stable_sort(evaluated, {}, cost);
  std::set<std::string> seen{request.sweep[winner].policy.name};
  std::vector<std::size_t> finalists{winner};
  std::size_t free_slots = kMaxFinalists;
  for (const std::size_t c : evaluated) {
    const bool first = seen.insert(request.sweep[c].policy.name).second;
    if (!first && free_slots == 0) continue;
    free_slots -= !first;
    finalists.push_back(c);
  }
  return finalists;
}

/// The budget in bytes: the largest of all configurations, because a tier plan leaves some bytes
/// unused when its numbers of slots are rounded down.
double budget_bytes(const Tuning& tuning, const TuneRequest& request) {
  BudgetBytes budget;
  for (std::size_t c = 0; c < request.sweep.size(); ++c)
    budget.add(tuning.memory[c].budget, request.sweep[c].policy.prompt);
  return budget.bytes();
}

/// Compares the configurations of the last round.
void judge(Tuning& tuning, const TuneRequest& request) {
  // [configuration]: index in the last round, or the sweep's size if it did not run there.
  std::vector<std::size_t> place(request.sweep.size(), request.sweep.size());
  for (std::size_t i = 0; i < tuning.halving.last.size(); ++i)
    place[tuning.order[tuning.halving.last[i]]] = i;
  std::vector<Candidate> candidates;
  ComparisonScope scope{
      .budget = std::to_string(tuning.budget_tokens),
      .budget_bytes = budget_bytes(tuning, request),
      .full_bytes = tuning.full_memory.mean,
      .metric = "KL",
      .texts = tuning.halving.kl.texts(),
      .tokens = tuning.halving.kl.tokens(),
      .note = request.task_accuracy.tasks.empty() ? "Task accuracy was not measured." : ""};
  for (std::size_t c = 0; c < request.sweep.size(); ++c) {  // in the order of the sweep
    if (place[c] == request.sweep.size()) continue;
    const PolicySpec& policy = request.sweep[c].policy;
    tuning.judged_configs.push_back(c);
    candidates.push_back({.name = policy.brief(),
                          .error = tuning.halving.kl.mean(place[c]),
                          .memory = tuning.memory[c]});
    if (protected_tokens_fill(policy.name, policy.params_text(),
                              static_cast<std::uint32_t>(tuning.budget_tokens)))
      scope.filled.push_back(policy.text());
  }
  const auto& configs = tuning.judged_configs;
  tuning.recommendation =
      recommend(std::move(candidates), std::move(scope), [&](std::size_t a, std::size_t b) {
        return tuning.halving.kl.difference(place[configs[a]], place[configs[b]]);
      });
}

/// Removes configurations that are over budget, unless all are.
void drop_over_budget(Tuning& tuning, const TuneRequest& request) {
  const double max_bytes = kSameMemory * budget_bytes(tuning, request);
  const auto more = [&](std::size_t c) { return tuning.memory[c].peak > max_bytes; };
  std::ranges::copy_if(tuning.order, std::back_inserter(tuning.over_budget), more);
  if (tuning.over_budget.size() == tuning.order.size()) return tuning.over_budget.clear();
  std::erase_if(tuning.order, more);
}

std::vector<Finalist> as_finalists(const Tuning& tuning, const TuneRequest& request) {
  std::vector<Finalist> finalists;
  const std::size_t first = tuning.finalists.front();
  const double kl_of_choice = mean_over(tuning.scores[first], &TuneScore::kl);
  for (const std::size_t c : tuning.finalists)
    finalists.push_back({request.sweep[c], kl_of_choice * kl_over_winner(tuning, c, first)});
  return finalists;
}

/// Chooses the configuration to deploy by KL and task accuracy.
void decide(Backend& backend, const Tokenizer& tokenizer, const TuneRequest& request,
            WorkPlan& plan, Tuning& tuning) {
  tuning.finalists =
      finalists_of(tuning, request, tuning.judged_configs[tuning.recommendation.choice]);
  const std::vector<Finalist> finalists = as_finalists(tuning, request);
  const std::size_t phase = 2 * request.texts.size() + 1;
  plan.set_work(phase, task_accuracy_work(finalists.size(), request.task_accuracy));
  if (!request.task_accuracy.tasks.empty())
    tuning.evaluated =
        evaluate_finalists(backend, tokenizer, finalists, request.task_accuracy, plan.phase(phase));
  tuning.choice = choose_by_both_criteria(finalists, tuning.evaluated);
  tuning.winner = tuning.finalists[tuning.choice.deployed];
}

/// The scores of a configuration or the full cache, with the texts that it ran.
json score_json(const Tuning& tuning, const TuneRequest& request, std::size_t config) {
  const std::vector<TuneScore>& scores = tuning.scores[config];
  std::vector<double> kl;
  json texts = json::array();
  std::uint64_t tokens = 0;
  for (const TuneScore& score : scores) {
    kl.push_back(score.kl);
    tokens += score.tokens;
    texts.push_back({{"name", request.texts[score.text].name},
                     {"tokens", score.tokens},
                     {"kl", score.kl},
                     {"perplexity", std::exp(score.nll)}});
  }
  const bool full = config == request.sweep.size();
  return {{"policy", full ? "full" : request.sweep[config].policy.text()},
          {"kl", mean_over(scores, &TuneScore::kl)},
          {"kl_deviation", number_or_null(spread_of(kl).deviation)},
          {"perplexity", std::exp(mean_over(scores, &TuneScore::nll))},
          {"same_first", mean_over(scores, &TuneScore::same_first)},
          {"tokens", tokens},
          {"texts", texts}};
}

/// The scores of the full cache, the best by each criterion, and the deployed configuration.
json scores_json(const Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> named{request.sweep.size(), tuning.winner, tuning.finalists.front()};
  if (tuning.choice.best_accuracy) named.push_back(tuning.finalists[*tuning.choice.best_accuracy]);
  json list = json::array();
  for (std::size_t i = 0; i < named.size(); ++i)
    if (std::find(named.begin(), named.begin() + static_cast<std::ptrdiff_t>(i), named[i]) ==
        named.begin() + static_cast<std::ptrdiff_t>(i))
      list.push_back(score_json(tuning, request, named[i]));
  return list;
}

json halving_json(const Tuning& tuning, const TuneRequest& request) {
  json rounds = json::array();
  for (const HalvingRound& round : tuning.halving.rounds) {
    json texts = json::array(), entries = json::array();
    for (const std::size_t text : round.texts) texts.push_back(request.texts[text].name);
    for (const HalvingEntry& entry : round.entries)
      entries.push_back({{"policy", request.sweep[tuning.order[entry.configuration]].policy.text()},
                         {"kl", entry.kl},
                         {"from_lowest", difference_json(entry.from_lowest)},
                         {"status", name_of(entry.status)}});
    rounds.push_back({{"texts_added", texts}, {"ranking", entries}});
  }
  return rounds;
}

/// A configuration's result in the offline replay, and its memory.
json held_json(const Tuning& tuning, const TuneRequest& request, std::size_t config) {
  return {{"policy", request.sweep[config].policy.text()},
          {tuning.metric, number_or_null(tuning.cost[config])},
          {"kv_bytes_mean", tuning.memory[config].mean},
          {"kv_bytes_peak", tuning.memory[config].peak}};
}

json offline_replay_json(const Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> order = tuning.order;
  std::ranges::stable_sort(order, {}, [&](std::size_t c) { return tuning.cost[c]; });
  json open = json::array();
  for (const std::size_t config : order) open.push_back(held_json(tuning, request, config));
  return {{"metric", tuning.metric}, {"ranking", open}};
}

}  // namespace

std::vector<std::string> tunable_policies(const CompiledPolicies& compiled) {
  std::vector<std::string> names;
  const auto add = [&](const PolicyEntry& entry) {
    const PolicyInfo& info = entry.info;
    if (info.evicts && info.feature_count() == 0 && !info.modifiers.once &&
        !entry.has_order_hooks() && std::string_view(info.name) != "random")
      names.emplace_back(entry.info.name);
  };
  for (const PolicyEntry& entry : policy_catalogue()) add(entry);
  for (const auto& entry : compiled.entries) add(*entry);
  return names;
}

std::vector<double> parameter_values(double standard, double min_value, double max_value) {
  std::vector<double> values{standard};
  // A parameter near 1, such as a decay, is varied by its distance from 1.
  const bool share = min_value >= 0 && max_value <= 1 && standard > 0.5 && standard < 1;
  const bool whole = standard >= 2 && standard == std::floor(standard);
  for (const double factor : {0.25, 4.0}) {
    double value = share ? 1 - factor * (1 - standard) : factor * standard;
    if (whole) value = std::max(1.0, std::round(value));
    if (share) value = std::round(value * 1e9) / 1e9;  // 0.92, not 0.9199999999999999
    values.push_back(std::clamp(value, min_value, max_value));
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled) {
  PolicySpec requested = parse_policy(text, {}, compiled);
  load_centre(requested.centre);
  if (!requested.entry->info.evicts)
    throw std::invalid_argument(fmt::format(
        "--policy: {} never evicts, so there is nothing to tune; leave it out", requested.name));
  if (text.find(':') != std::string::npos) {
    resolve_protected_tokens(requested, budget_tokens);
    return {requested};
  }
  std::vector<PolicySpec> variants;
  for (const std::vector<double>& params : parameters_of(requested))
    for (const Extent sinks : sinks_of(requested.entry->info))
      for (const Extent recent : recent_of(requested.entry->info)) {
        PolicySpec spec = requested;
        spec.params = params, spec.sinks = sinks, spec.recent = recent;
        if (fits(spec, budget_tokens)) variants.push_back(std::move(spec));
      }
  return variants;
}

std::vector<std::size_t> Tuning::similar() const {
  std::vector<std::size_t> configs{judged_configs[recommendation.choice]};
  for (const std::size_t candidate : recommendation.similar())
    configs.push_back(judged_configs[candidate]);
  return configs;
}

Tuning tune(Backend& backend, const SweepRunner& run_sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request) {
  if (request.sweep.size() < 2)
    throw std::invalid_argument(
        "--policy: there is only one configuration, so there is nothing to choose; give more");
  Tuning tuning;
  tuning.budget_tokens = common_budget(request, backend.config().head_size);
  tuning.scores.resize(request.sweep.size() + 1);
  for (const CacheConfig& config : request.sweep)
    tuning.memory.push_back(memory_of(config, request, backend.config()));
  tuning.full_memory = memory_of(CacheConfig{}, request, backend.config());
  HalvingInput field = field_of(request);
  WorkPlan plan = plan_of(run_sweep, request, field);
  const auto replay_metrics = offline_replay(backend, sketch, request, plan);
  tuning.metric = request.metric.empty() ? default_metric(replay_metrics) : request.metric;
  tuning.cost = cost_of(replay_metrics, tuning.metric, request.sweep.size());
  tuning.order = order_of(request, tuning.cost);
  drop_over_budget(tuning, request);
  field.configurations = tuning.order.size();
  tuning.halving = halving(run_sweep, request, field, plan, tuning);
  judge(tuning, request);
  decide(backend, tokenizer, request, plan, tuning);
  if (request.by_tokens)
    tuning.step = step_json(request.by_tokens, request.texts.front().ids,
                            request.texts.front().prompt_tokens, request.sweep[tuning.winner]);
  if (request.progress) request.progress(1);
  return tuning;
}

PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request,
                          const Backend& backend) {
  CacheConfig cache = request.sweep[tuning.winner];
  cache.budget = cache.budget_at_length(
      static_cast<std::uint32_t>(request.texts.front().ids.size()), backend.config().head_size);
  json similar = json::array(), texts = json::array();
  for (const std::size_t config : tuning.similar())
    if (config != tuning.winner) similar.push_back(request.sweep[config].policy.text());
  for (const EvalText& text : request.texts)
    texts.push_back({{"name", text.name},
                     {"tokens", text.ids.size()},
                     {"prompt_tokens", text.prompt_tokens},
                     {"ids_xxh3", xxh3_hex(std::as_bytes(std::span(text.ids)))}});
  json more = json::array();
  for (const std::size_t config : tuning.over_budget)
    more.push_back(held_json(tuning, request, config));
  json layers = json::array();  // the layers that the policy acts on
  const std::vector<std::uint32_t> windows = backend.config().heads().windows;
  for (std::size_t layer = 0; layer < windows.size(); ++layer)
    if (windows[layer] == 0) layers.push_back(layer);
  json run{{"kvlab", KVLAB_RELEASE},
           {"evaluation", "end_to_end"},
           {"layers", layers.size() == windows.size() ? json("all") : layers},
           {"metric", "kl"},
           {"texts", texts},
           {"offline_replay", offline_replay_json(tuning, request)},
           {"rounds", halving_json(tuning, request)},
           {"over_budget", more},
           {"recommendation", recommendation_json(tuning.recommendation)},
           {"ended", name_of(tuning.halving.end)},
           {"not_significantly_different", similar},
           {"work",
            {{"configuration_tokens", tuning.halving.work},
             {"exhaustive", tuning.halving.exhaustive},
             {"limited", tuning.halving.limited}}}};
  run["criteria"] = criteria_json(as_finalists(tuning, request), tuning.evaluated, tuning.choice);
  run["scores"] = scores_json(tuning, request);
  run["step"] = tuning.step;
  return {.cache = std::move(cache),
          .model = backend.config().name,
          .weights_xxh3 = backend.weights_xxh3(),
          .run = std::move(run)};
}

}  // namespace kvlab
