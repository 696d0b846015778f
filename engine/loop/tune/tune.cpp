#include "engine/loop/tune/tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>

#include "engine/loop/fidelity/fidelity.hpp"
#include "sim/head_view.hpp"
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
  if (info.oldest_first) return values;  // whatever is guarded, the oldest leave first
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

/// Parameters as asked, then each of them at other values.
std::vector<std::vector<double>> parameters_of(const PolicySpec& spec) {
  std::vector<std::vector<double>> all{spec.params};
  for (std::size_t i = 0; i < spec.params.size(); ++i) {
    const auto& param = spec.entry->params[i];
    for (const double value : parameter_values(param.standard, param.least, param.most)) {
      if (value == spec.params[i]) continue;
      all.push_back(spec.params);
      all.back()[i] = value;
    }
  }
  return all;
}

bool fits(const PolicySpec& spec, std::uint32_t budget_tokens) {
  try {
    resolve_guards(spec, budget_tokens);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

using nlohmann::json;

constexpr std::size_t kMostFinalists = 48;

/// Phases of the work: two for each text, then the race, then the answers.
enum Kind { kCapture, kReplay, kRace, kAnswers };

std::uint32_t common_budget(const TuneRequest& request, std::uint32_t head_size) {
  const CacheConfig& config = request.grid.front();
  const Budget& budget = config.budget;
  const auto tokens_in = [&](const LoopText& text) {
    return config.budget_in_tokens(static_cast<std::uint32_t>(text.ids.size()), head_size);
  };
  const std::uint32_t first = tokens_in(request.texts.front());
  for (const LoopText& text : request.texts)
    if (tokens_in(text) != first)
      throw std::invalid_argument(fmt::format(
          "--budget: {} is {} tokens of {} and {} of {}; give a number of tokens", budget.text(),
          first, request.texts.front().name, tokens_in(text), text.name));
  return first;
}

WorkPlan plan_of(const Sweep& sweep, const TuneRequest& request, const RaceField& field) {
  std::vector<WorkPhase> phases;
  for (const LoopText& text : request.texts) {
    const auto tokens = static_cast<double>(text.ids.size());
    phases.push_back({kCapture, text.trace ? 0 : tokens});
    phases.push_back({kReplay, tokens * static_cast<double>(request.grid.size())});
  }
  const std::size_t racing = first_contenders(field);
  phases.push_back({kRace, work_from(field, 0, racing)});
  phases.push_back({kAnswers, answer_work(std::min(racing, kMostFinalists), request.answers)});
  // A replay is a small part of the closed loop; the first text says how small.
  const double rate = closed_loop_rate(sweep, request.texts.front(), request.threads);
  return {request.progress, std::move(phases), {rate, rate / 20, rate, request.answers.rate}};
}

/// What a configuration holds over the first text, whose budget is that of all.
Memory memory_of(const CacheConfig& config, const TuneRequest& request, const ModelConfig& model) {
  const LoopText& text = request.texts.front();
  const auto segments =
      segments_of(static_cast<std::uint32_t>(text.ids.size()), text.prompt_tokens);
  return kvlab::memory_of(resolve(config, segments, 0, model.heads()), model.heads());
}

/// The figures of every text; a trace that is made for it goes at once.
std::vector<OpenLoopFigures> open_loop(Backend& backend, const OutputSketch& sketch,
                                       const TuneRequest& request, WorkPlan& plan) {
  std::vector<OpenLoopFigures> figures;
  for (std::size_t t = 0; t < request.texts.size(); ++t) {
    const TemporaryFolder scratch;
    figures.push_back(run_open_loop(backend, request.texts[t], request.grid,
                                    {.sketch = sketch,
                                     .capture = scratch / "trace",
                                     .every_output_error = request.every_output_error,
                                     .threads = request.threads,
                                     .device = request.device,
                                     .capturing = plan.phase(2 * t + kCapture),
                                     .progress = plan.phase(2 * t + kReplay)}));
  }
  return figures;
}

/// The mean over texts, lower being better.
std::vector<double> cost_of(const std::vector<OpenLoopFigures>& figures, const std::string& metric,
                            std::size_t configs) {
  const MetricInfo* const info = find_metric(metric);
  std::vector<double> cost(configs);
  for (const OpenLoopFigures& text : figures) {
    const auto found = text.find(metric);
    if (!info || found == text.end())
      throw std::invalid_argument(
          fmt::format("--metric: '{}' is not a figure of these texts", metric));
    for (std::size_t c = 0; c < configs; ++c)
      cost[c] += (info->higher_is_better ? -1 : 1) * found->second[c] /
                 static_cast<double>(figures.size());
  }
  for (double& value : cost)  // what has no figure comes last
    if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  return cost;
}

bool is_as_registered(const PolicySpec& policy) {
  const PolicyInfo& info = policy.entry->info;
  return policy.sinks == info.sinks && policy.recent == info.recent &&
         std::ranges::equal(policy.params, policy.entry->params, {}, {}, &ParamInfo::standard);
}

/// The grid by its figure; before all others the first of each policy and each as it is registered,
/// so that no policy is left out for the work's sake.
std::vector<std::size_t> order_of(const TuneRequest& request, const std::vector<double>& figure) {
  std::vector<std::size_t> order(request.grid.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t c) { return figure[c]; });
  std::set<std::string> seen;
  std::stable_partition(order.begin(), order.end(), [&](std::size_t c) {
    const PolicySpec& policy = request.grid[c].policy;
    return seen.insert(policy.name).second || is_as_registered(policy);
  });
  return order;
}

TuneScore score_on(std::size_t text, const LoopScores& scores) {
  const auto same = std::accumulate(scores.same_first.begin(), scores.same_first.end(), 0.0);
  return {.text = text,
          .tokens = scores.nll.size(),
          .kl = spread_of(scores.kl).mean,
          .nll = spread_of(scores.nll).mean,
          .same_first = same / static_cast<double>(scores.nll.size())};
}

RaceField field_of(const TuneRequest& request) {
  RaceField field{.contenders = request.grid.size(), .share = request.share};
  for (const LoopText& text : request.texts) field.lengths.push_back(text.ids.size());
  return field;
}

Race race(const Sweep& sweep, const TuneRequest& request, const RaceField& field, WorkPlan& plan,
          Tuning& tuning) {
  const std::size_t phase = 2 * request.texts.size();
  double done = 0;
  return run_race(field, [&](std::size_t text, std::span<const std::size_t> contenders) {
    std::vector<CacheConfig> configs;
    for (const std::size_t contender : contenders)
      configs.push_back(request.grid[tuning.order[contender]]);
    const double own = static_cast<double>(field.lengths[text] * (contenders.size() + 1));
    const double all = done + work_from(field, text, contenders.size());
    plan.set_work(phase, all);
    const auto show = [&, race = plan.phase(phase)](double part) {
      race((done + part * own) / all);
    };
    auto scores = closed_loop_scores(sweep, request.texts[text], configs, request.threads, show);
    tuning.scores[request.grid.size()].push_back(score_on(text, scores[0]));
    for (std::size_t i = 0; i < contenders.size(); ++i)
      tuning.scores[tuning.order[contenders[i]]].push_back(score_on(text, scores[i + 1]));
    done += own;
    return kl_of(std::move(scores));
  });
}

/// A mean over texts, each of weight 1, as in PairedScores.
template <class Value>
double mean_over(std::span<const TuneScore> scores, Value value) {
  double sum = 0;
  for (const TuneScore& score : scores) sum += std::invoke(value, score);
  return sum / static_cast<double>(scores.size());
}

/// KL of one of the grid over the winner's, over the texts that both ran: who leaves has run the
/// first of the winner's.
double kl_of_least(const Tuning& tuning, std::size_t config, std::size_t winner) {
  const std::vector<TuneScore>&own = tuning.scores[config], &first = tuning.scores[winner];
  return mean_over(own, &TuneScore::kl) /
         mean_over(std::span(first).first(own.size()), &TuneScore::kl);
}

/// The winner in KL, those that raced behind it by their KL, as many as there is room for, and of
/// every policy the one of least KL: who is far says what answers would cost.
std::vector<std::size_t> finalists_of(const Tuning& tuning, const TuneRequest& request,
                                      std::size_t winner) {
  std::vector<std::size_t> raced;
  for (std::size_t c = 0; c < request.grid.size(); ++c)
    if (!tuning.scores[c].empty() && c != winner) raced.push_back(c);
  const auto cost = [&](std::size_t c) { return kl_of_least(tuning, c, winner); };
  std::ranges::stable_sort(raced, {}, cost);
  std::set<std::string> seen{request.grid[winner].policy.name};
  std::vector<std::size_t> finalists{winner};
  std::size_t room = kMostFinalists;
  for (const std::size_t c : raced) {
    const bool first = seen.insert(request.grid[c].policy.name).second;
    if (!first && room == 0) continue;
    room -= !first;
    finalists.push_back(c);
  }
  return finalists;
}

/// What the budget is in bytes: a ladder's rounding leaves some of them.
double budget_bytes(const Tuning& tuning) {
  return std::ranges::max(tuning.memory, {}, &Memory::budget).budget;
}

/// The configurations of the last round, compared.
void judge(Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> place(request.grid.size(), request.grid.size());  // in the last round
  for (std::size_t i = 0; i < tuning.race.last.size(); ++i)
    place[tuning.order[tuning.race.last[i]]] = i;
  std::vector<Candidate> candidates;
  ComparisonScope scope{
      .budget = std::to_string(tuning.budget_tokens),
      .budget_bytes = budget_bytes(tuning),
      .full_bytes = tuning.full_memory.mean,
      .metric = "KL",
      .texts = tuning.race.kl.texts(),
      .tokens = tuning.race.kl.tokens(),
      .note = request.answers.tasks.empty() ? "Task accuracy was not measured." : ""};
  for (std::size_t c = 0; c < request.grid.size(); ++c) {  // the grid's order
    if (place[c] == request.grid.size()) continue;
    const PolicySpec& policy = request.grid[c].policy;
    tuning.judged_configs.push_back(c);
    candidates.push_back({.name = policy.brief(),
                          .error = tuning.race.kl.mean(place[c]),
                          .memory = tuning.memory[c]});
    if (guards_fill(policy.name, policy.params_text(),
                    static_cast<std::uint32_t>(tuning.budget_tokens)))
      scope.filled.push_back(policy.text());
  }
  const auto& configs = tuning.judged_configs;
  tuning.recommendation =
      recommend(std::move(candidates), std::move(scope), [&](std::size_t a, std::size_t b) {
        return tuning.race.kl.difference(place[configs[a]], place[configs[b]]);
      });
}

/// Those that hold more than the budget do not race, unless all do.
void drop_holders_of_more(Tuning& tuning) {
  const double most = kSameMemory * budget_bytes(tuning);
  const auto more = [&](std::size_t c) { return tuning.memory[c].peak > most; };
  std::ranges::copy_if(tuning.order, std::back_inserter(tuning.more), more);
  if (tuning.more.size() == tuning.order.size()) return tuning.more.clear();
  std::erase_if(tuning.order, more);
}

std::vector<Finalist> as_finalists(const Tuning& tuning, const TuneRequest& request) {
  std::vector<Finalist> finalists;
  const std::size_t first = tuning.finalists.front();
  const double least = mean_over(tuning.scores[first], &TuneScore::kl);
  for (const std::size_t c : tuning.finalists)
    finalists.push_back({request.grid[c], least * kl_of_least(tuning, c, first)});
  return finalists;
}

/// Who is deployed, by both truths.
void decide(Backend& backend, const Tokenizer& tokenizer, const TuneRequest& request,
            WorkPlan& plan, Tuning& tuning) {
  tuning.finalists =
      finalists_of(tuning, request, tuning.judged_configs[tuning.recommendation.choice]);
  const std::vector<Finalist> finalists = as_finalists(tuning, request);
  const std::size_t phase = 2 * request.texts.size() + 1;
  plan.set_work(phase, answer_work(finalists.size(), request.answers));
  if (!request.answers.tasks.empty())
    tuning.asked = ask_finalists(backend, tokenizer, finalists, request.answers, plan.phase(phase));
  tuning.choice = choose_by_both(finalists, tuning.asked);
  tuning.winner = tuning.finalists[tuning.choice.deployed];
}

/// What one of the grid scored, or the full cache: over which texts, too.
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
  const bool full = config == request.grid.size();
  return {{"policy", full ? "full" : request.grid[config].policy.text()},
          {"kl", mean_over(scores, &TuneScore::kl)},
          {"kl_deviation", number_or_null(spread_of(kl).deviation)},
          {"perplexity", std::exp(mean_over(scores, &TuneScore::nll))},
          {"same_first", mean_over(scores, &TuneScore::same_first)},
          {"tokens", tokens},
          {"texts", texts}};
}

/// The full cache, the winner for each truth, and who is deployed.
json scores_json(const Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> named{request.grid.size(), tuning.winner, tuning.finalists.front()};
  if (tuning.choice.answers) named.push_back(tuning.finalists[*tuning.choice.answers]);
  json list = json::array();
  for (std::size_t i = 0; i < named.size(); ++i)
    if (std::find(named.begin(), named.begin() + static_cast<std::ptrdiff_t>(i), named[i]) ==
        named.begin() + static_cast<std::ptrdiff_t>(i))
      list.push_back(score_json(tuning, request, named[i]));
  return list;
}

json race_json(const Tuning& tuning, const TuneRequest& request) {
  json rounds = json::array();
  for (const RaceRound& round : tuning.race.rounds) {
    json texts = json::array(), entries = json::array();
    for (const std::size_t text : round.texts) texts.push_back(request.texts[text].name);
    for (const RaceEntry& entry : round.entries)
      entries.push_back({{"policy", request.grid[tuning.order[entry.contender]].policy.text()},
                         {"kl", entry.kl},
                         {"behind", difference_json(entry.behind)},
                         {"fate", name_of(entry.fate)}});
    rounds.push_back({{"texts_added", texts}, {"standings", entries}});
  }
  return rounds;
}

/// One of the grid in the open loop, and what it holds.
json held_json(const Tuning& tuning, const TuneRequest& request, std::size_t config) {
  return {{"policy", request.grid[config].policy.text()},
          {tuning.metric, number_or_null(tuning.figure[config])},
          {"kv_bytes_mean", tuning.memory[config].mean},
          {"kv_bytes_peak", tuning.memory[config].peak}};
}

json open_loop_json(const Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> order = tuning.order;
  std::ranges::stable_sort(order, {}, [&](std::size_t c) { return tuning.figure[c]; });
  json open = json::array();
  for (const std::size_t config : order) open.push_back(held_json(tuning, request, config));
  return {{"metric", tuning.metric}, {"ranking", open}};
}

}  // namespace

std::vector<std::string> tunable_policies(const CompiledPolicies& compiled) {
  std::vector<std::string> names;
  const auto add = [&](const PolicyEntry& entry) {
    const PolicyInfo& info = entry.info;
    if (info.evicts && info.column_count() == 0 && !info.modifiers.once &&
        std::string_view(info.name) != "random")
      names.emplace_back(entry.info.name);
  };
  for (const PolicyEntry& entry : policy_catalogue()) add(entry);
  for (const auto& entry : compiled.entries) add(*entry);
  return names;
}

std::vector<double> parameter_values(double standard, double least, double most) {
  std::vector<double> values{standard};
  // A share near 1 (a decay) is told by what it lacks of 1.
  const bool share = least >= 0 && most <= 1 && standard > 0.5 && standard < 1;
  const bool whole = standard >= 2 && standard == std::floor(standard);
  for (const double factor : {0.25, 4.0}) {
    double value = share ? 1 - factor * (1 - standard) : factor * standard;
    if (whole) value = std::max(1.0, std::round(value));
    if (share) value = std::round(value * 1e9) / 1e9;  // 0.92, not 0.9199999999999999
    values.push_back(std::clamp(value, least, most));
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled) {
  const PolicySpec asked = parse_policy(text, {}, compiled);
  if (!asked.entry->info.evicts)
    throw std::invalid_argument(fmt::format(
        "--policy: {} never evicts, so there is nothing to tune; leave it out", asked.name));
  if (text.find(':') != std::string::npos) {
    resolve_guards(asked, budget_tokens);
    return {asked};
  }
  std::vector<PolicySpec> variants;
  for (const std::vector<double>& params : parameters_of(asked))
    for (const Extent sinks : sinks_of(asked.entry->info))
      for (const Extent recent : recent_of(asked.entry->info)) {
        PolicySpec spec = asked;
        spec.params = params, spec.sinks = sinks, spec.recent = recent;
        if (fits(spec, budget_tokens)) variants.push_back(std::move(spec));
      }
  return variants;
}

std::vector<std::size_t> Tuning::tied() const {
  std::vector<std::size_t> configs{judged_configs[recommendation.choice]};
  for (const std::size_t candidate : recommendation.similar())
    configs.push_back(judged_configs[candidate]);
  return configs;
}

Tuning tune(Backend& backend, const Sweep& sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request) {
  if (request.grid.size() < 2)
    throw std::invalid_argument("--policy: one configuration is nothing to choose from; give more");
  Tuning tuning;
  tuning.budget_tokens = common_budget(request, backend.config().head_size);
  tuning.scores.resize(request.grid.size() + 1);
  for (const CacheConfig& config : request.grid)
    tuning.memory.push_back(memory_of(config, request, backend.config()));
  tuning.full_memory = memory_of(CacheConfig{}, request, backend.config());
  RaceField field = field_of(request);
  WorkPlan plan = plan_of(sweep, request, field);
  const auto figures = open_loop(backend, sketch, request, plan);
  tuning.metric = request.metric.empty() ? standard_figure(figures) : request.metric;
  tuning.figure = cost_of(figures, tuning.metric, request.grid.size());
  tuning.order = order_of(request, tuning.figure);
  drop_holders_of_more(tuning);
  field.contenders = tuning.order.size();
  tuning.race = race(sweep, request, field, plan, tuning);
  judge(tuning, request);
  decide(backend, tokenizer, request, plan, tuning);
  if (request.by_tokens)
    tuning.step = step_json(request.by_tokens, request.texts.front().ids,
                            request.texts.front().prompt_tokens, request.grid[tuning.winner]);
  if (request.progress) request.progress(1);
  return tuning;
}

PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request,
                          const Backend& backend) {
  CacheConfig cache = request.grid[tuning.winner];
  cache.budget = cache.budget_at_length(
      static_cast<std::uint32_t>(request.texts.front().ids.size()), backend.config().head_size);
  json ties = json::array(), texts = json::array();
  for (const std::size_t config : tuning.tied())
    if (config != tuning.winner) ties.push_back(request.grid[config].policy.text());
  for (const LoopText& text : request.texts)
    texts.push_back({{"name", text.name},
                     {"tokens", text.ids.size()},
                     {"prompt_tokens", text.prompt_tokens},
                     {"ids_xxh3", xxh3_hex(std::as_bytes(std::span(text.ids)))}});
  json more = json::array();
  for (const std::size_t config : tuning.more) more.push_back(held_json(tuning, request, config));
  json layers = json::array();  // those that the policy acts on
  const std::vector<std::uint32_t> spans = backend.config().heads().spans;
  for (std::size_t layer = 0; layer < spans.size(); ++layer)
    if (spans[layer] == 0) layers.push_back(layer);
  json run{{"kvlab", KVLAB_RELEASE},
           {"loop", "closed"},
           {"layers", layers.size() == spans.size() ? json("all") : layers},
           {"metric", "kl"},
           {"texts", texts},
           {"open_loop", open_loop_json(tuning, request)},
           {"rounds", race_json(tuning, request)},
           {"holds_more", more},
           {"recommendation", recommendation_json(tuning.recommendation)},
           {"ended", name_of(tuning.race.end)},
           {"ties", ties},
           {"work",
            {{"configuration_tokens", tuning.race.work},
             {"exhaustive", tuning.race.exhaustive},
             {"limited", tuning.race.limited}}}};
  run["truths"] = truths_json(as_finalists(tuning, request), tuning.asked, tuning.choice);
  run["scores"] = scores_json(tuning, request);
  run["step"] = tuning.step;
  return {.cache = std::move(cache),
          .model = backend.config().name,
          .weights_xxh3 = backend.weights_xxh3(),
          .run = std::move(run)};
}

}  // namespace kvlab
