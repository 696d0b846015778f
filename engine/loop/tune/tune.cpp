#include "engine/loop/tune/tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "engine/loop/fidelity/fidelity.hpp"
#include "sim/head_view.hpp"
#include "sim/report/verdict.hpp"
#include "sim/run/results.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr double kOpenShare = 0.4;  // of the bar

std::uint32_t common_budget(const TuneRequest& request) {
  const Budget& budget = request.grid.front().budget;
  const auto tokens_in = [&](const LoopText& text) {
    return budget.resolve(static_cast<std::uint32_t>(text.ids.size()));
  };
  const std::uint32_t first = tokens_in(request.texts.front());
  for (const LoopText& text : request.texts)
    if (tokens_in(text) != first)
      throw std::invalid_argument(fmt::format(
          "--budget: {} is {} tokens of {} and {} of {}; give a number of tokens", budget.text(),
          first, request.texts.front().name, tokens_in(text), text.name));
  return first;
}

/// What each of the grid holds over the first text, whose budget is that of all.
std::vector<Memory> memory_of(const TuneRequest& request, const ModelConfig& model) {
  const LoopText& text = request.texts.front();
  const auto segments =
      segments_of(static_cast<std::uint32_t>(text.ids.size()), text.prompt_tokens);
  std::vector<Memory> memory;
  for (const CacheConfig& config : request.grid)
    memory.push_back(kvlab::memory_of(resolve(config, segments, 0, model.heads()), model.heads(),
                                      model.shape().head_size));
  return memory;
}

/// The figures of every text; a trace that is made for it goes at once.
std::vector<OpenLoopFigures> open_loop(Backend& backend, const OutputSketch& sketch,
                                       const TuneRequest& request) {
  std::vector<OpenLoopFigures> figures;
  for (std::size_t t = 0; t < request.texts.size(); ++t) {
    const TemporaryFolder scratch;
    const auto show = [&, t](double done) {
      if (request.progress)
        request.progress(kOpenShare * (static_cast<double>(t) + done) /
                         static_cast<double>(request.texts.size()));
    };
    figures.push_back(run_open_loop(backend, request.texts[t], request.grid,
                                    {.sketch = sketch,
                                     .capture = scratch / "trace",
                                     .every_output_error = request.every_output_error,
                                     .threads = request.threads,
                                     .device = request.device,
                                     .progress = show}));
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

Race race(const Sweep& sweep, const TuneRequest& request, const std::vector<std::size_t>& order) {
  RaceField field{.contenders = order.size(), .lengths = {}, .share = request.share};
  for (const LoopText& text : request.texts) {
    field.lengths.push_back(text.ids.size());
    field.repeats.push_back(std::ranges::find(request.texts, text.ids, &LoopText::ids)->name !=
                            text.name);
  }
  std::size_t texts_done = 0;
  return run_race(field, [&](std::size_t text, std::span<const std::size_t> contenders) {
    std::vector<CacheConfig> configs;
    for (const std::size_t contender : contenders)
      configs.push_back(request.grid[order[contender]]);
    const auto show = [&](double done) {
      if (request.progress)
        request.progress(kOpenShare + (1 - kOpenShare) * (static_cast<double>(texts_done) + done) /
                                          static_cast<double>(request.texts.size()));
    };
    auto kl = closed_loop_kl(sweep, request.texts[text], configs, request.threads, show);
    ++texts_done;
    return kl;
  });
}

/// All that entered the last round answer, and the full cache.
std::vector<TuneAnswers> ask(Backend& backend, const Tokenizer& tokenizer,
                             const TuneRequest& request, const Tuning& tuning) {
  TaskRequest task = *request.task;
  std::vector<std::size_t> finalists;
  for (const RaceEntry& entry : tuning.race.rounds.back().entries)
    finalists.push_back(tuning.order[entry.contender]);
  task.configs = {CacheConfig{}};
  for (const std::size_t config : finalists) task.configs.push_back(request.grid[config]);
  const TaskRun run = run_task(backend, tokenizer, task);
  std::vector<TuneAnswers> answers;
  for (std::size_t c = 0; c < run.configs.size(); ++c)
    answers.push_back({c == 0 ? request.grid.size() : finalists[c - 1], 0, 0});
  for (const TaskFigure& figure : task_figures(run.answers, run.places, run.modes)) {
    if (figure.words || figure.depth) continue;
    const double part = figure.value / static_cast<double>(run.modes.size());
    if (figure.metric == "exact_match") answers[figure.config].right += part;
    if (figure.metric == "log_likelihood") answers[figure.config].log_likelihood += part;
  }
  return answers;
}

bool answers_better(const TuneAnswers& a, const TuneAnswers& b) {
  return a.right != b.right ? a.right > b.right : a.log_likelihood > b.log_likelihood;
}

/// The best at the task among those that KL cannot tell apart; without a task, the verdict's.
std::size_t choose(const Tuning& tuning) {
  const TuneAnswers* best = nullptr;
  for (const std::size_t config : tuning.tied())
    for (const TuneAnswers& answer : tuning.answers)
      if (answer.config == config && (!best || answers_better(answer, *best))) best = &answer;
  return best ? best->config : tuning.judged_configs[tuning.verdict.winner()];
}

/// Who entered the last round, judged; and behind them who holds more than the budget.
void judge(Tuning& tuning, const TuneRequest& request) {
  std::vector<std::size_t> place(request.grid.size(), request.grid.size());  // in the last round
  for (std::size_t i = 0; i < tuning.race.last.size(); ++i)
    place[tuning.order[tuning.race.last[i]]] = i;
  for (std::size_t c = 0; c < request.grid.size(); ++c) {  // the grid's order
    if (place[c] == request.grid.size()) continue;
    const PolicySpec& policy = request.grid[c].policy;
    tuning.judged_configs.push_back(c);
    tuning.contenders.push_back({.name = policy.text(),
                                 .error = tuning.race.kl.mean(place[c]),
                                 .memory = tuning.memory[c],
                                 .last_resort = is_last_resort(policy.name)});
    if (guards_fill(policy.name, policy.params_text(),
                    static_cast<std::uint32_t>(tuning.budget_tokens)))
      tuning.scope.filled.push_back(policy.text());
  }
  tuning.scope.budget = fmt::format("{} tokens", tuning.budget_tokens);
  tuning.scope.budget_bytes = tuning.memory.front().budget;
  tuning.scope.figure = "KL";
  tuning.scope.texts = tuning.race.kl.texts();
  tuning.scope.tokens = tuning.race.kl.tokens();
  tuning.scope.unmeasured = request.task ? "" : "answers were not asked";
  const auto& configs = tuning.judged_configs;
  tuning.verdict =
      verdict_of(tuning.contenders, tuning.scope.budget_bytes, [&](std::size_t a, std::size_t b) {
        return tuning.race.kl.difference(place[configs[a]], place[configs[b]]);
      });
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

json answers_json(const Tuning& tuning, const TuneRequest& request) {
  json answers = json::array();
  for (const TuneAnswers& answer : tuning.answers)
    answers.push_back({{"policy", answer.config == request.grid.size()
                                      ? "full"
                                      : request.grid[answer.config].policy.text()},
                       {"exact_match", answer.right},
                       {"log_likelihood", answer.log_likelihood}});
  return answers;
}

/// Those that hold more than the budget do not race, unless all do.
void drop_holders_of_more(Tuning& tuning) {
  const double most = kSameMemory * tuning.memory.front().budget;
  const auto more = [&](std::size_t c) { return tuning.memory[c].peak > most; };
  std::ranges::copy_if(tuning.order, std::back_inserter(tuning.more), more);
  if (tuning.more.size() == tuning.order.size()) return tuning.more.clear();
  std::erase_if(tuning.order, more);
}

}  // namespace

std::vector<std::size_t> Tuning::tied() const {
  std::vector<std::size_t> configs;
  for (const std::size_t contender : race.first) configs.push_back(order[contender]);
  return configs;
}

Tuning tune(Backend& backend, const Sweep& sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request) {
  if (request.grid.size() < 2)
    throw std::invalid_argument("--policy: one configuration is nothing to choose from; give more");
  Tuning tuning;
  tuning.budget_tokens = common_budget(request);
  tuning.memory = memory_of(request, backend.config());
  const std::vector<OpenLoopFigures> figures = open_loop(backend, sketch, request);
  tuning.metric = request.metric.empty() ? standard_figure(figures) : request.metric;
  tuning.figure = cost_of(figures, tuning.metric, request.grid.size());
  tuning.order.resize(request.grid.size());
  std::iota(tuning.order.begin(), tuning.order.end(), std::size_t{0});
  std::ranges::stable_sort(tuning.order, {}, [&](std::size_t c) { return tuning.figure[c]; });
  drop_holders_of_more(tuning);
  tuning.race = race(sweep, request, tuning.order);
  judge(tuning, request);
  if (request.task) tuning.answers = ask(backend, tokenizer, request, tuning);
  tuning.winner = choose(tuning);
  return tuning;
}

PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request,
                          const Backend& backend) {
  CacheConfig cache = request.grid[tuning.winner];
  cache.budget.extent = tokens(static_cast<std::uint32_t>(tuning.budget_tokens));
  cache.budget.all = false;
  json ties = json::array(), texts = json::array(), open = json::array();
  for (const std::size_t config : tuning.tied())
    if (config != tuning.winner) ties.push_back(request.grid[config].policy.text());
  for (const LoopText& text : request.texts)
    texts.push_back({{"name", text.name},
                     {"tokens", text.ids.size()},
                     {"prompt_tokens", text.prompt_tokens},
                     {"ids_xxh3", xxh3_hex(std::as_bytes(std::span(text.ids)))}});
  for (const std::size_t config : tuning.order) {
    open.push_back(
        {{"policy", request.grid[config].policy.text()},
         {tuning.metric,
          std::isfinite(tuning.figure[config]) ? json(tuning.figure[config]) : json(nullptr)}});
    open.back()["kv_bytes_mean"] = tuning.memory[config].mean;
    open.back()["kv_bytes_peak"] = tuning.memory[config].peak;
  }
  json more = json::array();
  for (const std::size_t config : tuning.more)
    more.push_back({{"policy", request.grid[config].policy.text()},
                    {tuning.metric, number_or_null(tuning.figure[config])},
                    {"kv_bytes_mean", tuning.memory[config].mean},
                    {"kv_bytes_peak", tuning.memory[config].peak}});
  json run{{"kvlab", KVLAB_VERSION},
           {"loop", "closed"},
           {"metric", "kl"},
           {"texts", texts},
           {"open_loop", {{"metric", tuning.metric}, {"ranking", open}}},
           {"rounds", race_json(tuning, request)},
           {"holds_more", more},
           {"verdict", verdict_json(tuning.verdict, tuning.contenders, tuning.scope)},
           {"ended", name_of(tuning.race.end)},
           {"ties", ties},
           {"work",
            {{"configuration_tokens", tuning.race.work},
             {"exhaustive", tuning.race.exhaustive},
             {"limited", tuning.race.limited}}}};
  if (request.task) {
    const auto best =
        std::ranges::min_element(tuning.answers.begin() + 1, tuning.answers.end(), answers_better);
    run["task"] = {{"asked", request.task->spec.text()},
                   {"answers", answers_json(tuning, request)},
                   {"winner", request.grid[best->config].policy.text()}};
  }
  return {.cache = std::move(cache),
          .model = backend.config().name,
          .weights_xxh3 = backend.weights_xxh3(),
          .run = std::move(run)};
}

}  // namespace kvlab
