#include "engine/loop/deploy/deploy.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "sim/report/verdict.hpp"
#include "sim/source/policy_source.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

BudgetColumn budget_of_run(const Figures& figures, const std::string& text) {
  const BudgetColumn* column = figures.find_budget(text);
  if (!column) {
    std::vector<std::string> known;
    for (const BudgetColumn& budget : figures.budgets()) known.push_back(budget.text);
    throw std::invalid_argument(
        fmt::format("--budget: {} is not in this run, which has {}", text, fmt::join(known, ", ")));
  }
  if (column->least_tokens != column->most_tokens)
    throw std::invalid_argument(fmt::format(
        "--budget: {} was {} to {} tokens, by trace; deploy a budget that was asked for in tokens",
        text, column->least_tokens, column->most_tokens));
  return *column;
}

void refuse_several_models(const RunInfo& info) {
  for (const RunTrace& trace : info.traces)
    if (trace.weights_xxh3 != info.traces.front().weights_xxh3)
      throw std::invalid_argument(fmt::format(
          "the run's traces {} and {} come from different weights; deploy from a run of one model",
          info.traces.front().name, trace.name));
}

/// What the yardsticks reached at the same budget.
json reference_scores(const Figures& figures, const Ballot& ballot) {
  json scores = json::object();
  for (std::size_t s = 0; s < figures.series().size(); ++s) {
    const Series& series = figures.series()[s];
    if (!series.is_reference() && !series.is_full()) continue;
    if (const auto score = figures.average(s, ballot.budget.text, ballot.metric->name))
      scores[series.label] = score->mean;
  }
  return scores;
}

/// A column of a run's figures as a budget, a share of the traces' length in tokens.
Budget budget_of(const RunInfo& info, const BudgetColumn& column) {
  for (const RunConfig& config : info.grid)
    if (config.budget == column.text && config.budgets.size() == info.traces.front().layers)
      return budget_of_heads(config.budgets);
  Budget budget{.extent = tokens(column.least_tokens)};
  if (column.text.starts_with('@')) return budget;
  const Budget asked = parse_budget(column.text);
  budget.split = asked.split, budget.bytes = asked.bytes, budget.in_bytes = asked.bytes > 0;
  return budget;
}

}  // namespace

Ballot rank_for_deployment(const Run& run, const Figures& figures, const std::string& budget,
                           const std::string& metric) {
  Ballot ballot{.budget = budget_of_run(figures, budget), .metric = &deciding_metric(metric)};
  refuse_several_models(run.info);
  ballot.ranking = rank_policies(figures, ballot.budget.text, *ballot.metric);
  if (ballot.ranking.empty())
    throw std::invalid_argument(
        fmt::format("the run has no policy with {} at budget {}; only references and full, which "
                    "are not deployed",
                    metric, budget));
  ballot.ranking.scope.tokens = scored_tokens(run.info, run.rows);
  ballot.ranking.scope.unmeasured = "open loop; answers were not asked";
  ballot.winner = ballot.ranking.winner;
  return ballot;
}

CacheConfig config_of(const Run& run, const Ballot& ballot, const Figures& figures,
                      std::size_t standing, const CompiledPolicies& compiled) {
  const Series& series = figures.series()[ballot.standings()[standing].series];
  const std::string text =
      series.params.empty() ? series.policy : series.policy + ":" + series.params;
  CompiledPolicies own;
  try {
    for (const RunSource& source : run.info.sources)
      if (source.policy == series.policy)
        own = require_source(compiled, source.policy, source.path, source.xxh3, "run.json");
    own.column_source = compiled.column_source;
    return {.policy = parse_policy(text, {}, own),
            .budget = budget_of(run.info, ballot.budget),
            .prefill = parse_prefill(series.prefill),
            .positions = parse_positions(series.positions),
            .seed = series.seed,
            .threshold = run.info.threshold};
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("the run's {}: {}", series.label, error.what()));
  }
}

PolicyFile policy_file_of(const Run& run, const Figures& figures, const Ballot& ballot,
                          const CompiledPolicies& compiled) {
  CacheConfig config = config_of(run, ballot, figures, ballot.winner, compiled);
  json traces = json::array(), ties = json::array();
  for (std::size_t i = 0; i < ballot.standings().size(); ++i) {
    const Standing& standing = ballot.standings()[i];
    if (standing.ties && i != ballot.winner)
      ties.push_back(figures.series()[standing.series].label);
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
                  {"span", name_of(run.info.span)},
                  {"traces", traces},
                  {"layers", layers.empty() ? json("all") : json(layers)},
                  {"ranking", standings_json(ballot.ranking, figures)},
                  {"ties", ties},
                  {"verdict", verdict_json(ballot.ranking.verdict, ballot.ranking.contenders,
                                           ballot.ranking.scope)},
                  {"references", reference_scores(figures, ballot)},
                  {"loop", "open"}}};
}

std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot) {
  const auto judged = evaluation.judged(evaluation.scores[1].config.budget.text());
  std::vector<Confirmed> confirmed;
  const auto add = [&](std::size_t c, const Difference& behind, bool holds_more) {
    const std::size_t score = judged.scores[c];  // behind the full cache
    confirmed.push_back({score - 1, evaluation.scores[score], behind, holds_more});
  };
  for (std::size_t i = 0; i < judged.verdict.order.size(); ++i)
    add(judged.verdict.order[i], judged.verdict.behind[i], false);
  for (const std::size_t c : judged.verdict.more) add(c, {}, true);
  ballot.winner = judged.scores[judged.verdict.winner()] - 1;
  return confirmed;
}

nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot) {
  auto list = nlohmann::ordered_json::array();
  for (const Confirmed& entry : confirmed)
    list.push_back({{"policy", figures.series()[ballot.standings()[entry.standing].series].label},
                    {"kl", number_or_null(entry.score.kl)},
                    {"kl_stderr", number_or_null(entry.score.kl_error)},
                    {"behind", difference_json(entry.behind)},
                    {"ties_with_first", entry.ties()},
                    {"holds_more", entry.holds_more},
                    {"perplexity", number_or_null(entry.score.perplexity)},
                    {"perplexity_stderr", number_or_null(entry.score.perplexity_error)},
                    {"same_first", number_or_null(entry.score.same_first)},
                    {"kl_deviation", number_or_null(entry.score.kl_deviation)},
                    {"tokens", entry.score.tokens}});
  return list;
}

}  // namespace kvlab
