#include "sim/run/ranking.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>

#include "policies/catalogue.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kAll = "all";

/// Returns the settings of `series` that are not defaults and that at least one other series of its
/// policy lacks.
std::string distinct_params(const Series& series, const std::vector<const Series*>& siblings) {
  std::string text;
  const auto own = split_list(brief_policy(series.policy + ":" + series.params), ':');
  for (const std::string& part : std::span(own).subspan(1)) {
    const bool common = std::all_of(siblings.begin(), siblings.end(), [&](const Series* other) {
      const auto parts = split_list(other->params, ':');
      return std::find(parts.begin(), parts.end(), part) != parts.end();
    });
    if (!common && !part.empty()) text += ":" + part;
  }
  return text;
}

template <class Member>
bool differs(const std::vector<const Series*>& siblings, Member member) {
  return std::any_of(siblings.begin(), siblings.end(), [&](const Series* other) {
    return other->*member != siblings.front()->*member;
  });
}

std::string label_of(const Series& series, const std::vector<Series>& all) {
  std::vector<const Series*> siblings;
  for (const Series& other : all)
    if (other.policy == series.policy) siblings.push_back(&other);
  std::vector<std::string> extras;
  if (differs(siblings, &Series::prefill)) extras.push_back(series.prefill);
  if (differs(siblings, &Series::positions)) extras.push_back(series.positions + " positions");
  if (differs(siblings, &Series::seed)) extras.push_back(fmt::format("seed {}", series.seed));
  std::string label = series.policy + distinct_params(series, siblings);
  if (!extras.empty()) label += fmt::format(" ({})", fmt::join(extras, ", "));
  return label;
}

}  // namespace

bool is_informative(const Series& oracle, std::string_view metric) {
  const bool is_refetch = metric.starts_with("fetch_") || metric == "selection_recall";
  if (oracle.policy == kBelady || is_refetch)
    return oracle.policy == kBelady && metric.starts_with("fetch_");
  if (oracle.policy == kOracleResidual)
    return metric == "residual_error" || metric == "regret_residual";
  return metric.find("recall") != metric.npos || metric == "miss_rate";
}

MetricTable::MetricTable(std::span<const ResultRow> rows) {
  std::map<std::tuple<std::string, std::string, std::string, std::string, std::uint64_t>,
           std::size_t>
      known;
  std::map<std::string_view, std::size_t> known_budgets;
  std::set<std::string_view> known_traces;
  for (const ResultRow& row : rows) {
    const auto [place, added] = known.try_emplace(
        {row.policy, row.params, row.prefill, row.positions, row.seed}, series_.size());
    if (added)
      series_.push_back({row.policy, row.params, row.prefill, row.positions, row.seed, ""});
    if (known_traces.insert(row.trace).second) traces_.push_back(row.trace);
    index_[{place->second, row.budget, row.metric, {row.layer, row.head}}].push_back(&row);
    if (row.budget == kAll) continue;
    const auto [budget, new_budget] = known_budgets.try_emplace(row.budget, budgets_.size());
    if (new_budget) budgets_.push_back({row.budget, row.budget_tokens, row.budget_tokens});
    BudgetColumn& column = budgets_[budget->second];
    column.min_tokens = std::min(column.min_tokens, row.budget_tokens);
    column.max_tokens = std::max(column.max_tokens, row.budget_tokens);
  }
  for (Series& series : series_) series.label = label_of(series, series_);
  std::stable_sort(
      budgets_.begin(), budgets_.end(), [](const BudgetColumn& a, const BudgetColumn& b) {
        return std::tie(a.min_tokens, a.max_tokens) < std::tie(b.min_tokens, b.max_tokens);
      });
}

const BudgetColumn* MetricTable::find_budget(std::string_view text) const {
  for (const BudgetColumn& column : budgets_)
    if (column.text == text) return &column;
  std::uint32_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (error != std::errc{} || end != text.data() + text.size()) return nullptr;
  for (const BudgetColumn& column : budgets_)
    if (column.min_tokens == tokens && column.max_tokens == tokens) return &column;
  return nullptr;
}

std::vector<const ResultRow*> MetricTable::rows(std::size_t series, std::string_view budget,
                                                std::string_view metric, Scope scope) const {
  const auto found =
      index_.find({series, series_[series].is_full() ? kAll : budget, metric, scope});
  return found == index_.end() ? std::vector<const ResultRow*>{} : found->second;
}

PairedScores MetricTable::paired_scores(std::span<const std::size_t> series,
                                        std::string_view budget, std::string_view metric,
                                        Scope scope) const {
  std::map<std::string_view, PairedText> texts;
  std::vector<std::string_view> order;
  for (std::size_t i = 0; i < series.size(); ++i)
    for (const ResultRow* row : rows(series[i], budget, metric, scope)) {
      if (!row->counts) continue;
      const std::string_view name = row->text.empty() ? row->trace : row->text;
      const auto [place, added] = texts.try_emplace(name);
      PairedText& text = place->second;
      if (added) {
        order.push_back(name);
        text.text = name;
        text.tokens = static_cast<double>(std::max<std::uint64_t>(row->count, 1));
        text.means.assign(series.size(), std::numeric_limits<double>::quiet_NaN());
        text.blocks.resize(series.size());
        text.block_weights = row->block_weights;
        text.is_binary = metric == "exact_match";
      }
      text.means[i] = row->value;
      text.blocks[i] = row->blocks;
    }
  PairedScores scores(series.size());
  for (const std::string_view name : order) scores.add(std::move(texts.at(name)));
  return scores;
}

std::optional<Average> MetricTable::average(std::size_t series, std::string_view budget,
                                            std::string_view metric, Scope scope) const {
  const auto found = rows(series, budget, metric, scope);
  if (found.empty()) return std::nullopt;
  Average average = paired_scores(std::span(&series, 1), budget, metric, scope).average(0);
  if (average.texts == 0) return std::nullopt;
  const auto counted = std::ranges::find(found, true, &ResultRow::counts);
  const double own = counted == found.end() ? average.standard_error : (*counted)->standard_error;
  if (average.texts == 1 && std::isfinite(own)) average = average.with_error(own);
  return average;
}

std::optional<Difference> MetricTable::difference(std::size_t a, std::size_t b,
                                                  std::string_view budget,
                                                  std::string_view metric) const {
  const std::size_t both[] = {a, b};
  const Difference difference = paired_scores(both, budget, metric, {}).difference(0, 1);
  return difference.texts == 0 ? std::nullopt : std::optional(difference);
}

MetricTable::CommonScores MetricTable::average_common(std::span<const std::size_t> series,
                                                      std::string_view budget,
                                                      std::string_view metric) const {
  const PairedScores common = paired_scores(series, budget, metric, {}).restrict_to_common();
  CommonScores found;
  for (std::size_t i = 0; i < series.size(); ++i) {
    const auto own = average(series[i], budget, metric);
    // If all series have the same traces, uses the average over the traces of this series. For a
    // single trace, the standard error of that average is the one in the row of results.
    const bool all = common.texts() == 0 || common.texts() == own->texts;
    found.averages.push_back(all ? *own : common.average(i));
  }
  if (common.texts() > 0) found.difference = common.difference(series.size() - 1, 0);
  return found;
}

Memory MetricTable::memory(std::size_t series, std::string_view budget) const {
  const auto bytes = [&](std::string_view metric) {
    const auto found = average(series, budget, metric);
    return found ? found->mean : 0;
  };
  return {bytes("kv_bytes_mean"), bytes("kv_bytes_peak"), bytes("state_bytes")};
}

namespace {

/// Fills the other members of `ranking` from its recommendation.
void place(Ranking& ranking, const MetricTable& metric_table, std::string_view budget,
           const MetricInfo& metric) {
  const Recommendation& made = ranking.recommendation;
  const auto add = [&](std::size_t c, const Difference& from_lowest, bool ties, bool over) {
    const std::size_t series = ranking.series[c];
    if (c == made.choice) ranking.winner = ranking.ranked.size();
    ranking.ranked.push_back({series, *metric_table.average(series, budget, metric.name),
                              from_lowest, ties, over, made.candidates[c].memory});
  };
  for (std::size_t i = 0; i < made.order.size(); ++i)
    add(made.order[i], made.from_lowest[i], !made.from_choice[i].significantly_different(), false);
  for (const std::size_t c : made.over_budget)
    add(c, {.mean = std::numeric_limits<double>::quiet_NaN()}, false, true);
}

/// Memory of the full cache over decoded queries; 0 if unknown. A run may also have full caches
/// with quantized tokens. The largest one is that in 16 bit.
double full_bytes(const MetricTable& metric_table, std::string_view budget) {
  double bytes = 0;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s)
    if (metric_table.series()[s].is_full())
      bytes = std::max(bytes, metric_table.memory(s, budget).mean);
  return bytes;
}

}  // namespace

Ranking rank_policies(const MetricTable& metric_table, std::string_view budget,
                      const MetricInfo& metric, Frontier frontier) {
  Ranking ranking;
  const double sign = metric.higher_is_better ? -1 : 1;
  std::vector<Candidate> candidates;
  BudgetBytes budget_bytes;
  ComparisonScope scope{.budget = std::string(budget),
                        .full_bytes = full_bytes(metric_table, budget),
                        .metric = std::string(metric.label),
                        .higher_is_better = metric.higher_is_better};
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& series = metric_table.series()[s];
    if (series.is_oracle() || series.is_full()) continue;
    const auto score = metric_table.average(s, budget, metric.name);
    if (!score) continue;
    if (const auto bytes = metric_table.average(s, budget, "budget_bytes"))
      budget_bytes.add(bytes->mean, keeps_prompt(series.params));
    ranking.series.push_back(s);
    candidates.push_back({.name = series.label,
                          .error = sign * score->mean,
                          .memory = metric_table.memory(s, budget)});
    const auto rows = metric_table.rows(s, budget, metric.name);
    if (protected_tokens_fill(series.policy, series.params, rows.front()->budget_tokens))
      scope.filled.push_back(series.label);
    scope.texts = std::max(scope.texts, score->texts);
  }
  if (candidates.empty()) return ranking;
  scope.budget_bytes = budget_bytes.bytes();
  const auto difference = [&](std::size_t a, std::size_t b) {
    const auto found =
        metric_table.difference(ranking.series[a], ranking.series[b], budget, metric.name);
    // If the two have no trace in common, there is no difference, and it is reported as unknown.
    return !found ? Difference{} : sign < 0 ? found->reverse() : *found;
  };
  ranking.recommendation = recommend(std::move(candidates), std::move(scope), difference, frontier);
  place(ranking, metric_table, budget, metric);
  return ranking;
}

std::vector<Recommendation> recommendations_of(const MetricTable& metric_table,
                                               const MetricInfo& metric, std::uint64_t tokens,
                                               const std::string& note) {
  std::vector<Recommendation> found;
  for (const BudgetColumn& budget : metric_table.budgets()) {
    Ranking ranking = rank_policies(metric_table, budget.text, metric);
    if (ranking.empty()) continue;
    found.push_back(std::move(ranking.recommendation));
    found.back().scope.tokens = tokens;
    found.back().scope.note = note;
  }
  return found;
}

}  // namespace kvlab
