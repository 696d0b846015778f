#include "engine/evaluation/deploy/deploy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "sim/plan/centre_file.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/source/policy_source.hpp"
#include "traces/base/json.hpp"
#include "traces/base/work_plan.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

BudgetColumn budget_of_run(const MetricTable& metric_table, const std::string& text) {
  const BudgetColumn* column = metric_table.find_budget(text);
  if (!column) {
    std::vector<std::string> known;
    for (const BudgetColumn& budget : metric_table.budgets()) known.push_back(budget.text);
    if (known.empty())
      throw std::invalid_argument(fmt::format("--budget: {}: {}", text, kNoBudgetInRun));
    throw std::invalid_argument(
        fmt::format("--budget: {} is not in this run, which has {}", text, fmt::join(known, ", ")));
  }
  if (column->min_tokens != column->max_tokens)
    throw std::invalid_argument(
        fmt::format("--budget: {} stands for {} to {} tokens, depending on the trace; give a "
                    "budget of this run that was requested in tokens",
                    text, column->min_tokens, column->max_tokens));
  return *column;
}

/// Scores of the oracles and of `full` at the same budget.
json baseline_scores(const MetricTable& metric_table, const Ballot& ballot) {
  json scores = json::object();
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& series = metric_table.series()[s];
    if (!series.is_oracle() && !series.is_full()) continue;
    if (const auto score = metric_table.average(s, ballot.budget.text, ballot.metric->name))
      scores[series.label] = score->mean;
  }
  return scores;
}

/// The budget of a column of a run's metrics. A share is converted to tokens by the traces' length.
Budget budget_of(const RunInfo& info, const BudgetColumn& column) {
  for (const RunConfig& config : info.sweep)
    if (config.budget == column.text && config.budgets.size() == info.traces.front().layers)
      return budget_of_heads(config.budgets);
  Budget budget{.extent = tokens(column.min_tokens)};
  if (column.text.starts_with('@')) return budget;
  const Budget requested = parse_budget(column.text);
  budget.split = requested.split, budget.in_bytes = requested.in_bytes;
  if (requested.in_bytes) {
    const auto& shortest = std::ranges::min(info.traces, {}, &RunTrace::tokens);
    budget.bytes = requested.bytes_of(shortest.tokens, shortest.head_size);
  }
  return budget;
}

}  // namespace

Ballot rank_for_deployment(const Run& run, const MetricTable& metric_table,
                           const std::string& budget, const std::string& metric) {
  Ballot ballot{.budget = budget_of_run(metric_table, budget), .metric = &deciding_metric(metric)};
  refuse_several_models(run.info, "deploy");
  ballot.ranking = rank_policies(metric_table, ballot.budget.text, *ballot.metric);
  if (ballot.ranking.empty())
    throw std::invalid_argument(
        fmt::format("the run has no policy with {} at budget {}; only oracles and full, which "
                    "cannot be deployed",
                    metric, budget));
  ballot.ranking.recommendation.scope.tokens = scored_tokens(run.info, run.rows);
  ballot.ranking.recommendation.scope.note = std::string(kReplayNote);
  ballot.winner = ballot.ranking.winner;
  return ballot;
}

CacheConfig config_of(const Run& run, const Ballot& ballot, const MetricTable& metric_table,
                      std::size_t rank, const CompiledPolicies& compiled) {
  const Series& series = metric_table.series()[ballot.ranked()[rank].series];
  const std::string text =
      series.params.empty() ? series.policy : series.policy + ":" + series.params;
  CompiledPolicies own;
  try {
    for (const RunSource& source : run.info.sources)
      if (source.policy == series.policy)
        own = require_source(compiled, source.policy, source.path, source.xxh3, "run.json");
    own.feature_source = compiled.feature_source;
    PolicySpec policy = parse_policy(text, {}, own);
    load_centre(policy.centre);
    return {.policy = std::move(policy),
            .budget = budget_of(run.info, ballot.budget),
            .prefill = parse_prefill(series.prefill),
            .positions = parse_positions(series.positions),
            .seed = series.seed,
            .threshold = run.info.threshold};
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("the run's {}: {}", series.label, error.what()));
  }
}

PolicyFile policy_file_of(const Run& run, const MetricTable& metric_table, const Ballot& ballot,
                          const CompiledPolicies& compiled) {
  CacheConfig config = config_of(run, ballot, metric_table, ballot.winner, compiled);
  json traces = json::array(), similar = json::array();
  for (std::size_t i = 0; i < ballot.ranked().size(); ++i) {
    const RankedPolicy& policy = ballot.ranked()[i];
    if (policy.is_similar && i != ballot.winner)
      similar.push_back(metric_table.series()[policy.series].label);
  }
  const auto& layers = run.info.traces.front().numbers;
  for (const RunTrace& trace : run.info.traces)
    traces.push_back({{"name", trace.name}, {"hash", trace.hash}});
  return {.cache = std::move(config),
          .model = run.info.traces.front().model,
          .weights_xxh3 = run.info.traces.front().weights_xxh3,
          .run = {{"hash", run.hash},
                  {"kvlab", run.info.version},
                  {"metric", ballot.metric->name},
                  {"better", ballot.metric->higher_is_better ? "higher" : "lower"},
                  {"queries", name_of(run.info.queries)},
                  {"traces", traces},
                  {"layers", layers.empty() ? json("all") : json(layers)},
                  {"ranking", ranking_json(ballot.ranking, metric_table)},
                  {"not_significantly_different", similar},
                  {"recommendation", recommendation_json(ballot.ranking.recommendation)},
                  {"references", baseline_scores(metric_table, ballot)},
                  {"evaluation", "offline_replay"}}};
}

std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot) {
  const auto judgement = evaluation.judge_budget(evaluation.scores[1].config.budget.text());
  const Recommendation& made = judgement.recommendation;
  std::vector<Confirmed> confirmed;
  const auto add = [&](std::size_t c, const Difference& from_choice, bool over) {
    const std::size_t score = judgement.scores[c];  // score 0 is the full cache
    confirmed.push_back({score - 1, evaluation.scores[score], from_choice, over});
  };
  for (std::size_t i = 0; i < made.order.size(); ++i)
    add(made.order[i], made.from_choice[i], false);
  for (const std::size_t c : made.over_budget) add(c, {}, true);
  ballot.winner = judgement.scores[made.choice] - 1;
  return confirmed;
}

nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const MetricTable& metric_table, const Ballot& ballot) {
  auto list = nlohmann::ordered_json::array();
  for (const Confirmed& entry : confirmed)
    list.push_back({{"policy", metric_table.series()[ballot.ranked()[entry.rank].series].label},
                    {"kl", number_or_null(entry.score.kl)},
                    {"kl_stderr", number_or_null(entry.score.kl_error)},
                    {"from_choice", difference_json(entry.from_choice)},
                    {"not_significantly_different", entry.is_similar()},
                    {"over_budget", entry.over_budget},
                    {"perplexity", number_or_null(entry.score.perplexity)},
                    {"perplexity_stderr", number_or_null(entry.score.perplexity_error)},
                    {"same_first", number_or_null(entry.score.same_first)},
                    {"kl_deviation", number_or_null(entry.score.kl_deviation)},
                    {"tokens", entry.score.tokens}});
  return list;
}

namespace {

using nlohmann::json;

const std::vector<double> kDepths{0, 0.25, 0.5, 0.75, 1};
constexpr std::uint32_t kMinWords = 30;
constexpr double kEnough = 0.8;  // share of the questions that the full cache must answer right
// Maximum number of finalists that answer all questions. The first kMaxEvaluatedNear of these
// places are for finalists near the lowest KL.
constexpr std::size_t kMaxEvaluated = 12, kMaxEvaluatedNear = 9;
// Estimated work, relative to that of appending the prompt once. kCacheWork: answering with one
// cache. kAgainWork: appending prompts again for answers that are not decided in the first pass.
constexpr double kCacheWork = 0.15, kAgainWork = 0.3;
constexpr double kTokensOfWord = 1.4;

double lowest_kl(std::span<const Finalist> finalists) {
  return std::ranges::min(finalists, {}, &Finalist::kl).kl;
}
bool is_near(std::span<const Finalist> finalists, std::size_t finalist) {
  return finalists[finalist].kl <= kNearKl * lowest_kl(finalists);
}

class FinalistEvaluator {
 public:
  FinalistEvaluator(Backend& backend, const Tokenizer& tokenizer,
                    std::span<const Finalist> finalists, const TaskAccuracyPlan& plan,
                    std::function<void(double)> progress)
      : backend_(backend),
        tokenizer_(tokenizer),
        finalists_(finalists),
        plan_(plan),
        progress_(std::move(progress)) {}

  std::vector<TaskAccuracy> ask() {
    std::vector<TaskAccuracy> evaluated;
    for (const PlannedTask& task : plan_.tasks)
      evaluated.push_back({.task = task.spec.text(),
                           .words = task.words,
                           .right = std::vector<std::vector<bool>>(finalists_.size())});
    std::vector<std::size_t> left(finalists_.size());
    std::iota(left.begin(), left.end(), std::size_t{0});
    const std::uint32_t heat = first_round_samples(plan_.samples);
    if (left.size() <= kMaxEvaluated) {
      run(evaluated, left, 0, plan_.samples);
      return evaluated;
    }
    run(evaluated, left, 0, heat);
    left = finalists_that_continue(evaluated);
    for (TaskAccuracy& task : evaluated)
      for (std::size_t f = 0; f < finalists_.size(); ++f)
        if (std::ranges::find(left, f) == left.end()) task.right[f].clear();
    run(evaluated, left, heat, plan_.samples);
    return evaluated;
  }

  static std::uint32_t first_round_samples(std::uint32_t samples) { return (samples + 3) / 4; }

  /// The longest length tried at which the full cache answers four of five questions; 0 if there is
  /// none.
  std::uint32_t length_of(const TaskSpec& task, std::uint32_t max_words) {
    for (std::uint32_t words = max_words; words >= std::min(kMinWords, max_words) && words > 0;
         words /= 2) {
      std::vector<bool> full;
      for (const auto& row : answers(task, words, {}, 0, 1, 0)) full.push_back(row[0]);
      if (share_of(full) >= kEnough) return words;
    }
    return 0;
  }

 private:
  /// The finalists that answer the remaining questions. Takes the first finalist, then the
  /// finalists near the lowest KL with the best task accuracy until there are kMaxEvaluatedNear,
  /// then the others with the best task accuracy until there are kMaxEvaluated.
  std::vector<std::size_t> finalists_that_continue(
      const std::vector<TaskAccuracy>& evaluated) const {
    std::vector<std::size_t> others(finalists_.size() - 1), chosen{0};
    std::iota(others.begin(), others.end(), std::size_t{1});
    std::ranges::stable_sort(others, std::greater<>{}, [&](std::size_t f) {
      double right = 0;
      for (const TaskAccuracy& task : evaluated) right += share_of(task.right[f]);
      return right;
    });
    for (const std::size_t f : others)
      if (chosen.size() < kMaxEvaluatedNear && is_near(finalists_, f)) chosen.push_back(f);
    for (const std::size_t f : others)
      if (chosen.size() < kMaxEvaluated && std::ranges::find(chosen, f) == chosen.end())
        chosen.push_back(f);
    std::ranges::sort(chosen);
    return chosen;
  }

  /// Runs a task and returns whether each answer is right, [prompt][configuration]. The full cache
  /// is the first configuration.
  std::vector<std::vector<bool>> answers(const TaskSpec& task, std::uint32_t words,
                                         std::span<const std::size_t> which, std::uint32_t first,
                                         std::uint32_t samples, double weight) {
    TaskRequest request{
        .spec = task,
        .words = {words},
        .depths = kDepths,
        .first_sample = first,
        .samples = samples,
        .seed = plan_.seed,
        .modes = {QueryMode::agnostic},
        .configs = {CacheConfig{}},
        .chat = plan_.chat,
        .beyond_context = true,  // if the full cache finds nothing, the length is halved
        .answers = {.max_rows = plan_.max_rows}};
    for (const std::size_t f : which) request.configs.push_back(finalists_[f].config);
    request.answers.progress = [&](double part) {
      if (progress_) progress_(done_ + weight * part);
    };
    const TaskRun run = run_task(backend_, tokenizer_, request);
    done_ += weight;
    std::vector<std::vector<bool>> right;
    for (const auto& prompt_answers : run.answers) {
      auto& row = right.emplace_back();
      for (const TaskAnswer& answer : prompt_answers[0]) row.push_back(answer.right);
    }
    return right;
  }

  /// Evaluates the finalists `which` on the samples first to last - 1 of every task.
  void run(std::vector<TaskAccuracy>& evaluated, std::span<const std::size_t> which,
           std::uint32_t first, std::uint32_t last) {
    const double all = task_accuracy_work(finalists_.size(), plan_);
    for (std::size_t t = 0; t < evaluated.size(); ++t) {
      TaskAccuracy& task = evaluated[t];
      if (task.words == 0) continue;
      const double weight = work_of(which.size(), last - first, task.words) / all;
      for (const auto& row : answers(plan_.tasks[t].spec, task.words, which, first, last, weight)) {
        task.full.push_back(row[0]);
        for (std::size_t i = 0; i < which.size(); ++i) task.right[which[i]].push_back(row[i + 1]);
      }
    }
  }

 public:
  /// The work of one task.
  static double work_of(std::size_t caches, std::uint32_t samples, std::uint32_t words) {
    return static_cast<double>(kDepths.size() * samples) * words * kTokensOfWord *
           (1 + (caches ? kAgainWork : 0) + kCacheWork * static_cast<double>(caches));
  }

 private:
  Backend& backend_;
  const Tokenizer& tokenizer_;
  std::span<const Finalist> finalists_;
  const TaskAccuracyPlan& plan_;
  const std::function<void(double)> progress_;
  double done_ = 0;
};

/// Filters the finalists `which` by one task after another. Each task keeps those whose share of
/// right answers is within kAlikeShare of the highest share among the finalists that are left.
std::vector<std::size_t> best_of(std::vector<std::size_t> which,
                                 std::span<const TaskAccuracy> evaluated) {
  for (const TaskAccuracy& task : evaluated) {
    if (task.words == 0) continue;
    double best_share = 0;
    for (const std::size_t f : which) best_share = std::max(best_share, share_of(task.right[f]));
    std::erase_if(which, [&](std::size_t f) {
      return share_of(task.right[f]) < best_share - kAlikeShare - 1e-9;
    });
  }
  return which;
}

/// The difference of two shares of right answers to the same samples, compared in pairs.
Difference from(const std::vector<bool>& own, const std::vector<bool>& other) {
  std::uint64_t gained = 0, lost = 0;
  for (std::size_t i = 0; i < own.size(); ++i) {
    gained += own[i] && !other[i];
    lost += other[i] && !own[i];
  }
  return share_difference(gained, lost, own.size());
}

/// The shares as text: "100% of passkey, 88% of needle".
std::string shares_text(std::span<const TaskAccuracy> evaluated, std::size_t finalist) {
  std::vector<std::string> shares;
  for (const TaskAccuracy& task : evaluated)
    if (task.words)
      shares.push_back(
          fmt::format("{:.0f}% of {}", 100 * share_of(task.right[finalist]), task.task));
  return fmt::format("{}", fmt::join(shares, ", "));
}

}  // namespace

double share_of(const std::vector<bool>& right) {
  const auto hits = static_cast<double>(std::count(right.begin(), right.end(), true));
  return right.empty() ? 0 : hits / static_cast<double>(right.size());
}

void find_lengths(Backend& backend, const Tokenizer& tokenizer, TaskAccuracyPlan& plan) {
  FinalistEvaluator questioner(backend, tokenizer, {}, plan, {});
  double seconds = 0, work = 0;
  for (PlannedTask& task : plan.tasks) {
    const double before = wall_clock();
    task.words = questioner.length_of(task.spec, task.words);
    if (task.words == 0) continue;
    seconds += wall_clock() - before;
    work += FinalistEvaluator::work_of(0, 1, task.words);
  }
  if (work > 0) plan.rate = seconds / work;
}

std::vector<TaskAccuracy> evaluate_finalists(Backend& backend, const Tokenizer& tokenizer,
                                             std::span<const Finalist> finalists,
                                             const TaskAccuracyPlan& plan,
                                             const std::function<void(double)>& progress) {
  return FinalistEvaluator(backend, tokenizer, finalists, plan, progress).ask();
}

double task_accuracy_work(std::size_t finalists, const TaskAccuracyPlan& plan) {
  const std::uint32_t heat = finalists <= kMaxEvaluated
                                 ? plan.samples
                                 : FinalistEvaluator::first_round_samples(plan.samples);
  double work = 0;
  for (const PlannedTask& task : plan.tasks)
    work += FinalistEvaluator::work_of(finalists, heat, task.words) +
            FinalistEvaluator::work_of(kMaxEvaluated, plan.samples - heat, task.words);
  return work;
}

Choice choose_by_both_criteria(std::span<const Finalist> finalists,
                               std::span<const TaskAccuracy> evaluated) {
  if (evaluated.empty()) return {.deployed = 0, .why = "task accuracy was not measured"};
  std::vector<std::size_t> all, near;
  for (std::size_t f = 0; f < finalists.size(); ++f) {
    const bool answered =
        std::ranges::any_of(evaluated, [&](const TaskAccuracy& task) { return task.has(f); });
    if (!answered) continue;
    all.push_back(f);
    if (is_near(finalists, f)) near.push_back(f);
  }
  if (all.empty())
    return {
        .deployed = 0,
        .why =
            "chosen by KL alone, because the model itself (full cache) answers too few questions"};
  // The first finalist is the choice by KL. Another finalist may have a slightly lower KL but need
  // more memory. So the first finalist wins whenever it is among `which`.
  const auto best_by_kl = [&](const std::vector<std::size_t>& which) {
    if (std::ranges::find(which, std::size_t{0}) != which.end()) return std::size_t{0};
    return *std::ranges::min_element(which, {}, [&](std::size_t f) { return finalists[f].kl; });
  };
  const auto price = [&, lowest = lowest_kl(finalists)](std::size_t f) {
    return fmt::format("{:.0f}% more KL", 100 * (finalists[f].kl / lowest - 1));
  };
  Choice choice{
      .best_accuracy = best_by_kl(best_of(all, evaluated)),
      .deployed = near.empty() ? 0 : best_by_kl(best_of(near, evaluated)),
      .why = "best by KL, and no policy within 20% of the lowest KL answers more questions"};
  if (choice.deployed != 0)
    choice.why = fmt::format(
        "the chosen policy answers {}, and the best policy by KL answers {}; the chosen policy has "
        "{} than the lowest",
        shares_text(evaluated, choice.deployed), shares_text(evaluated, 0), price(choice.deployed));
  if (*choice.best_accuracy != choice.deployed)
    choice.why += fmt::format("; {} answers {}, but has {}, and more than {:.0f}% is not accepted",
                              finalists[*choice.best_accuracy].config.policy.text(),
                              shares_text(evaluated, *choice.best_accuracy),
                              price(*choice.best_accuracy), 100 * (kNearKl - 1));
  return choice;
}

json criteria_json(std::span<const Finalist> finalists, std::span<const TaskAccuracy> evaluated,
                   const Choice& choice) {
  json tasks = json::array(), policies = json::array();
  for (const TaskAccuracy& task : evaluated)
    tasks.push_back({{"task", task.task},
                     {"mode", name_of(QueryMode::agnostic)},
                     {"words", task.words},
                     {"samples", task.samples()},
                     {"full", task.samples() ? json(share_of(task.full)) : json(nullptr)}});
  for (std::size_t f = 0; f < finalists.size(); ++f) {
    json entry{{"policy", finalists[f].config.policy.text()},
               {"kl_over_lowest", finalists[f].kl / lowest_kl(finalists)}};
    for (const TaskAccuracy& task : evaluated) {
      if (!task.has(f)) continue;
      const auto& right = task.right[f];
      const auto hits = static_cast<std::uint64_t>(std::count(right.begin(), right.end(), true));
      const Interval interval = share_interval(hits, right.size());
      entry["task_accuracy"].push_back(
          {{"task", task.task},
           {"right", share_of(right)},
           {"low", interval.low},
           {"high", interval.high},
           {"from_deployed", difference_json(from(right, task.right[choice.deployed]))}});
    }
    policies.push_back(std::move(entry));
  }
  const auto name = [&](std::size_t f) { return finalists[f].config.policy.text(); };
  return {
      {"distribution", name(0)},
      {"task_accuracy", choice.best_accuracy ? json(name(*choice.best_accuracy)) : json(nullptr)},
      {"deployed", name(choice.deployed)},
      {"why", choice.why},
      {"evaluated", tasks},
      {"policies", policies}};
}

std::string criteria_text(const json& criteria) {
  constexpr std::size_t kMaxShown = 12;
  std::string text;
  for (const json& task : criteria.at("evaluated"))
    text += task.at("words") == 0
                ? fmt::format(
                      "{} skipped: the model itself (full cache) scores below {:.0f}% at "
                      "every length tried\n",
                      task.at("task").get<std::string>(), 100 * kEnough)
                : fmt::format("{}, {} words, {} samples, {}: the full cache answers {:.0f}%\n",
                              task.at("task").get<std::string>(), task.at("words").get<int>(),
                              task.at("samples").get<int>(), task.at("mode").get<std::string>(),
                              100 * task.at("full").get<double>());
  std::size_t shown = 0;
  for (const json& policy : criteria.at("policies")) {
    if (!policy.contains("task_accuracy") || shown++ >= kMaxShown) continue;
    text += fmt::format("  {:<44} KL × {:.2f}", policy.at("policy").get<std::string>(),
                        policy.at("kl_over_lowest").get<double>());
    for (const json& answer : policy.at("task_accuracy"))
      text +=
          fmt::format("   {} {:.0f}% ({:.0f}-{:.0f})", answer.at("task").get<std::string>(),
                      100 * answer.at("right").get<double>(), 100 * answer.at("low").get<double>(),
                      100 * answer.at("high").get<double>());
    text += "\n";
  }
  const json& answers = criteria.at("task_accuracy");
  return text + fmt::format("best by KL: {}\nbest by task accuracy: {}\nchosen: {} ({})\n",
                            criteria.at("distribution").get<std::string>(),
                            answers.is_null() ? "none (tasks skipped)" : answers.get<std::string>(),
                            criteria.at("deployed").get<std::string>(),
                            criteria.at("why").get<std::string>());
}

json step_json(const SweepRunner& by_tokens, const std::vector<std::int32_t>& ids,
               std::uint32_t prompt_tokens, const CacheConfig& config) {
  constexpr std::size_t kSteps = 256;
  const std::vector<std::int32_t> beginning(
      ids.begin(),
      ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), prompt_tokens + kSteps)));
  const std::vector<CacheConfig> configs{CacheConfig{}, config};
  const auto scores = by_tokens({beginning}, configs, {.prompt_tokens = prompt_tokens})[0];
  json milliseconds = json::object();
  for (std::size_t c = 0; c < configs.size(); ++c) {
    std::vector<double> steps(scores[c].seconds.begin(), scores[c].seconds.end());
    milliseconds[c == 0 ? "full" : "deployed"] = 1000 * quantile(std::move(steps), 0.5);
  }
  return {{"milliseconds", milliseconds}, {"tokens", beginning.size()}};
}

}  // namespace kvlab
