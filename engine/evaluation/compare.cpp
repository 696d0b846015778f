#include "engine/evaluation/compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "policies/catalogue.hpp"
#include "sim/replay.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

/// Names of the runs: those of their folders, with a number added if two names are equal. ':' and
/// '=' are replaced, because they separate parameters.
std::vector<std::string> names_of(const std::vector<ScoreSet>& sets) {
  std::vector<std::string> names;
  for (const ScoreSet& set : sets) {
    std::string name = set.name;
    std::ranges::replace_if(
        name, [](char c) { return c == ':' || c == '='; }, '_');
    std::string unlike = name;
    for (int n = 2; std::ranges::find(names, unlike) != names.end(); ++n)
      unlike = fmt::format("{} {}", name, n);
    names.push_back(unlike);
  }
  return names;
}

/// A policy's parameters in a comparison: its parameters in the run, and the name of the run.
std::string params_in(const std::string& params, const std::string& run) {
  return params + (params.empty() ? "run=" : ":run=") + run;
}

std::vector<MetricInfo> common_metrics(const std::vector<ScoreSet>& sets) {
  std::vector<MetricInfo> metrics;
  for (const MetricInfo& metric : sets.front().metrics)
    if (std::ranges::all_of(sets, [&](const ScoreSet& set) {
          return std::ranges::find(set.metrics, metric.name, &MetricInfo::name) !=
                 set.metrics.end();
        }))
      metrics.push_back(metric);
  return metrics;
}

std::string chosen_metric(const std::vector<ScoreSet>& sets, const std::vector<MetricInfo>& common,
                          const std::string& requested) {
  std::vector<std::string_view> names;
  for (const MetricInfo& metric : common)
    if (metric.ranks) names.push_back(metric.name);
  if (names.empty()) throw std::invalid_argument("the runs have no metric in common");
  const auto known = [&](const std::string& name) {
    return std::ranges::find(names, name) != names.end();
  };
  if (!requested.empty()) {
    if (!known(requested))
      throw std::invalid_argument(
          fmt::format("--metric: not every run has '{}'; all of them have: {}", requested,
                      fmt::join(names, ", ")));
    return requested;
  }
  for (const ScoreSet& set : sets)
    if (known(set.headline)) return set.headline;
  return std::string(names.front());
}

void join(ScoreSet& together, const ScoreSet& set, const std::string& run) {
  for (const SequenceGroup& group : set.groups) {
    auto own = std::ranges::find(together.groups, group.name, &SequenceGroup::name);
    if (own == together.groups.end())
      own = together.groups.insert(own, SequenceGroup{group.name, {}});
    for (ResultRow row : group.rows) {
      row.params = params_in(row.params, run);
      own->rows.push_back(std::move(row));
    }
  }
}

/// The series in `run` that has the same configuration as `like`, which is from another run.
std::optional<std::size_t> series_in(const MetricTable& metric_table, const ResultRow& like,
                                     const std::string& params) {
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& series = metric_table.series()[s];
    if (series.policy == like.policy && series.params == params && series.prefill == like.prefill &&
        series.positions == like.positions && series.seed == like.seed)
      return s;
  }
  return std::nullopt;
}

std::vector<ComparedRow> rows_of(const std::vector<ScoreSet>& sets, const Comparison& comparison) {
  std::vector<ComparedRow> compared;
  for (const SequenceGroup& group : comparison.together.groups) {
    const MetricTable metric_table(group.rows);
    std::set<
        std::tuple<std::string, std::string, std::string, std::string, std::string, std::uint64_t>>
        done;
    for (const ScoreSet& set : sets) {
      const auto own = std::ranges::find(set.groups, group.name, &SequenceGroup::name);
      if (own == set.groups.end()) continue;
      for (const ResultRow& row : own->rows) {
        if (row.layer >= 0 || row.metric != comparison.metric) continue;
        if (!done.insert({row.policy, row.params, row.budget, row.prefill, row.positions, row.seed})
                 .second)
          continue;
        ComparedRow line{group.name,
                         row.policy + (row.params.empty() ? "" : ":") + row.params,
                         row.budget,
                         {},
                         {}};
        std::vector<std::size_t> there, places;
        for (const std::string& name : comparison.names) {
          const auto s = series_in(metric_table, row, params_in(row.params, name));
          line.scores.emplace_back();
          if (!s || !metric_table.average(*s, row.budget, row.metric)) continue;
          there.push_back(*s), places.push_back(line.scores.size() - 1);
        }
        if (there.size() < 2) continue;
        const auto common = metric_table.average_common(there, row.budget, row.metric);
        for (std::size_t i = 0; i < there.size(); ++i) line.scores[places[i]] = common.averages[i];
        if (places.front() == 0 && places.back() + 1 == line.scores.size())
          line.difference = common.difference;
        compared.push_back(std::move(line));
      }
    }
  }
  return compared;
}

/// Whether a row is a policy that evicts, not an oracle or the full cache.
bool is_policy(const ComparedRow& line) {
  const std::string name = line.policy.substr(0, line.policy.find(':'));
  return name != "full" && !is_oracle(name);
}

/// How often the last run is better than the first, among the policies that both runs have.
ordered_json shared_json(const Comparison& comparison) {
  const MetricInfo& metric =
      *std::ranges::find(comparison.together.metrics, comparison.metric, &MetricInfo::name);
  std::size_t better = 0, worse = 0, similar = 0, configurations = 0;
  for (const ComparedRow& line : comparison.rows) {
    if (!is_policy(line) || !line.is_in_first_and_last()) continue;
    ++configurations;
    if (!line.difference) continue;
    if (!line.difference->significantly_different())
      ++similar;
    else
      ++((line.difference->mean > 0) == metric.higher_is_better ? better : worse);
  }
  return {{"configurations", configurations},
          {"better", better},
          {"worse", worse},
          {"similar", similar}};
}

ordered_json average_json(const std::optional<Average>& average) {
  if (!average) return nullptr;
  return {{"mean", average->mean},
          {"error", number_or_null(average->standard_error)},
          {"low", number_or_null(average->interval.low)},
          {"high", number_or_null(average->interval.high)}};
}

ordered_json mean_json(const std::optional<Average>& average) {
  return average ? ordered_json(average->mean) : ordered_json(nullptr);
}

ordered_json row_json(const ComparedRow& row, const std::vector<std::string>& names) {
  ordered_json values = ordered_json::object();
  for (std::size_t i = 0; i < names.size(); ++i) values[names[i]] = mean_json(row.scores[i]);
  return {{"model", row.group},
          {"policy", row.policy},
          {"budget", row.budget},
          {"values", values},
          {"difference", mean_json(row.difference)},
          {"interval", row.difference ? difference_json(*row.difference) : ordered_json(nullptr)},
          {"stderr",
           row.difference ? number_or_null(row.difference->standard_error) : ordered_json(nullptr)},
          {"not_significantly_different",
           row.difference && !row.difference->significantly_different()}};
}

}  // namespace

std::string compared_text(const ComparedRow& row) {
  const std::optional<Difference>& difference = row.difference;
  if (!difference) return row.is_in_first_and_last() ? "nothing scored in common" : "not in both";
  if (std::isnan(difference->interval.low))
    return difference_text(*difference) + ", no interval known";
  return difference_text(*difference, ", ") +
         (difference->significantly_different() ? ", significant" : ", not significant");
}

Comparison compare(std::vector<ScoreSet> sets, const std::string& metric) {
  if (sets.size() < 2)
    throw std::invalid_argument(
        "one run is not enough to compare; give two or more: kvlab compare RUN RUN");
  Comparison comparison{.names = names_of(sets)};
  for (const ScoreSet& set : sets) {
    if (set.kind != sets.front().kind)
      throw std::invalid_argument(
          fmt::format("{} has results of kind {}, but {} of kind {}; give runs of one kind",
                      sets.front().name, sets.front().kind, set.name, set.kind));
    if (set.sequences != sets.front().sequences && comparison.warning.empty())
      comparison.warning = fmt::format(
          "the runs were measured on different texts: {} on {}, {} on {}; each row uses the texts "
          "that all of its runs have",
          sets.front().name, sets.front().sequences, set.name, set.sequences);
  }
  for (const ScoreSet& set : sets)
    if (set.scored != sets.front().scored && comparison.warning.empty())
      comparison.warning = fmt::format(
          "the runs did not score the same: {} scored {}, and {} scored {}; rows are compared only "
          "if they were scored on the same",
          sets.front().name, sets.front().scored, set.name, set.scored);
  comparison.together = {.kind = sets.front().kind,
                         .name = fmt::format("{}", fmt::join(comparison.names, ", ")),
                         .note = sets.front().note};
  comparison.together.metrics = common_metrics(sets);
  comparison.metric = chosen_metric(sets, comparison.together.metrics, metric);
  comparison.together.headline = comparison.metric;
  for (std::size_t i = 0; i < sets.size(); ++i)
    join(comparison.together, sets[i], comparison.names[i]);
  comparison.rows = rows_of(sets, comparison);
  const auto by =
      std::ranges::find(comparison.together.metrics, comparison.metric, &MetricInfo::name);
  for (const ScoreSet& set : sets)
    comparison.recommendations.push_back(recommendations_for(set, *by));
  return comparison;
}

ordered_json comparison_json(const Comparison& comparison) {
  ordered_json rows = ordered_json::array(), recommendations = ordered_json::object();
  for (std::size_t i = 0; i < comparison.names.size(); ++i)
    recommendations[comparison.names[i]] = recommendations_json(comparison.recommendations[i]);
  for (const ComparedRow& row : comparison.rows) rows.push_back(row_json(row, comparison.names));
  return {{"metric", comparison.metric},
          {"runs", comparison.names},
          {"warning", comparison.warning},
          {"recommendations", recommendations},
          {"rows", rows}};
}

PageDocument compare_page(const Comparison& comparison) {
  ordered_json data = explorer_data(comparison.together), facts = comparison_json(comparison);
  data["kind"] = "compare";
  facts["of"] = comparison.together.kind;
  facts["shared"] = shared_json(comparison);
  facts.erase("recommendations");
  facts["runs"] = ordered_json::array();
  std::string text;
  for (std::size_t i = 0; i < comparison.names.size(); ++i) {
    const auto& made = comparison.recommendations[i];
    const auto no_colour = [](const std::string&) { return std::string(); };
    facts["runs"].push_back(page_json(made, no_colour, comparison.names[i]));
    text += comparison.names[i] + "\n" + recommendations_text(made);
  }
  for (std::size_t i = 0; i < comparison.rows.size(); ++i) {
    ordered_json& row = facts["rows"][i];
    row["label"] = brief_policy(comparison.rows[i].policy);
    row["scores"] = ordered_json::array();
    for (const auto& score : comparison.rows[i].scores)
      row["scores"].push_back(average_json(score));
  }
  data["facts"] = std::move(facts);
  return {std::move(data), std::move(text)};
}

}  // namespace kvlab
