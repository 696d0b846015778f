#include "engine/evaluation/pages/compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "policies/catalogue.hpp"
#include "sim/replay.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"

namespace kvlab {
namespace {

/// The folders' names, with a number if two are equal. Contains no ':' or '=', which separate
/// parameters.
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

/// A policy's parameters in a comparison: its own, and the run.
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
          fmt::format("--metric: '{}' is not in all of the runs; they have in common: {}",
                      requested, fmt::join(names, ", ")));
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

/// The series in `run` of the same configuration as `like`, which is from another run.
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
        const auto common = metric_table.in_common(there, row.budget, row.metric);
        for (std::size_t i = 0; i < there.size(); ++i) line.scores[places[i]] = common.averages[i];
        line.difference = common.difference;
        compared.push_back(std::move(line));
      }
    }
  }
  return compared;
}

std::string table_of(const Comparison& comparison) {
  std::vector<Column> columns{{"policy", false}, {"budget"}, {"model", false}};
  for (const std::string& name : comparison.names) columns.push_back({escape(name)});
  const bool paired = std::ranges::any_of(
      comparison.rows, [](const ComparedRow& line) { return line.difference.has_value(); });
  if (paired)
    columns.insert(columns.end(), {{fmt::format("{} − {}", escape(comparison.names.back()),
                                                escape(comparison.names.front()))},
                                   {"95% from"},
                                   {"to"},
                                   {"", false}});
  std::vector<std::vector<Cell>> rows;
  for (const ComparedRow& line : comparison.rows) {
    std::vector<Cell> row{escape(brief_policy(line.policy)), escape(line.budget),
                          escape(line.group)};
    for (const auto& score : line.scores) row.push_back(score ? average_cell(*score) : Cell("–"));
    if (paired && line.difference) {
      const Difference& difference = *line.difference;
      for (const double value :
           {difference.mean, difference.interval.low, difference.interval.high})
        row.push_back(number_cell(value));
      row.emplace_back(difference.significantly_different() ? "significant" : "not significant");
    } else if (paired) {
      row.insert(row.end(), {"–", "", "", "no text in common"});
    }
    rows.push_back(std::move(row));
  }
  return html_section("Configurations that the runs share",
                      rows.empty() ? "No configuration is in two of the runs." : "",
                      rows.empty() ? "" : table(columns, rows));
}

/// Whether a row is a policy that evicts, not an oracle or the full cache.
bool is_policy(const ComparedRow& line) {
  const std::string name = line.policy.substr(0, line.policy.find(':'));
  return name != "full" && !is_oracle(name);
}

/// How often the last run is better on the texts that it shares with the first.
std::string shared_text(const Comparison& comparison) {
  const MetricInfo& metric =
      *std::ranges::find(comparison.together.metrics, comparison.metric, &MetricInfo::name);
  std::size_t better = 0, worse = 0, alike = 0, shared = 0;
  for (const ComparedRow& line : comparison.rows) {
    if (!is_policy(line)) continue;
    ++shared;
    if (!line.difference) continue;
    if (!line.difference->significantly_different())
      ++alike;
    else
      ++((line.difference->mean > 0) == metric.higher_is_better ? better : worse);
  }
  const std::string first = escape(comparison.names.front()),
                    last = escape(comparison.names.back());
  if (shared == 0)
    return "No policy has the same settings and budget in two of the runs, so there is no "
           "difference to show.";
  const std::string configurations =
      fmt::format("{} {}", shared, shared == 1 ? "configuration is" : "configurations are");
  if (better + worse + alike == 0)
    return fmt::format(
        "{} in two of the runs, but the runs share no text, so differences are not paired and not "
        "shown.",
        configurations);
  return fmt::format(
      "{} in both and measured on the same texts. <strong>{}</strong> is significantly better than "
      "<strong>{}</strong> in {}, significantly worse in {}, and not significantly different in "
      "{}.{}",
      configurations, last, first, better, worse, alike,
      comparison.warning.empty() ? ""
                                 : " Texts that are in only one run do not count for differences.");
}

/// The recommendations of each run.
std::string front_of(const Comparison& comparison) {
  std::string html = fmt::format("<p class=\"answer\" style=\"--accent:var(--blue)\">{}</p>\n",
                                 shared_text(comparison));
  for (std::size_t i = 0; i < comparison.names.size(); ++i)
    if (!comparison.recommendations[i].empty())
      html += recommendations_html(
          comparison.recommendations[i], "", [](const std::string&) { return std::string(); },
          comparison.names[i]);
  return html + fmt::format(
                    "<p class=\"next\"><strong>Next:</strong> <code>kvlab report {} --out "
                    "page.html</code></p>\n",
                    escape(comparison.names.back()));
}

}  // namespace

std::string compared_text(const std::optional<Difference>& difference) {
  if (!difference) return "no text in common";
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
      throw std::invalid_argument(fmt::format("{}: {}; {}: {}; give runs of one kind",
                                              sets.front().name, sets.front().kind, set.name,
                                              set.kind));
    if (set.sequences != sets.front().sequences && comparison.warning.empty())
      comparison.warning = fmt::format(
          "the runs were measured on different texts: {} on {}, {} on {}; each row uses the texts "
          "that all of its runs have",
          sets.front().name, sets.front().sequences, set.name, set.sequences);
  }
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

std::string compare_page(const Comparison& comparison) {
  const std::string title = "How do " + join_names(comparison.names) + " differ?";
  const Explorer explorer =
      explorer_of(comparison.together, "Each policy of each " + comparison.together.kind);
  std::set<std::string> groups;
  for (const SequenceGroup& group : comparison.together.groups) groups.insert(group.name);
  const std::string context =
      fmt::format("{} {}s, compared by {}. Models: {}. Values are not averaged over models.",
                  comparison.names.size(), comparison.together.kind, escape(comparison.metric),
                  escape(fmt::format("{}", fmt::join(groups, "; "))));
  return html_page("kvlab: " + title,
                   html_front("kvlab compare", escape(title), context, front_of(comparison)) +
                       explorer.sections + table_of(comparison),
                   explorer.data);
}

}  // namespace kvlab
