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
constexpr std::size_t kEnoughTraces = 8;  // for their scatter to be a standard error by itself

/// The settings of `series` that not every series of its policy has, and that are no defaults.
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

/// The mean of one value per trace, each with its own standard error (NaN: none).
Average average_of(std::span<const double> values, std::span<const double> errors) {
  const auto n = static_cast<double>(values.size());
  Average average{.traces = values.size()};
  double squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    average.mean += values[i] / n;
    squares += errors[i] * errors[i];
  }
  average.standard_error = std::sqrt(squares) / n;
  if (values.size() < 2) return average;
  double scatter = 0;
  for (const double value : values) scatter += (value - average.mean) * (value - average.mean);
  const double between = std::sqrt(scatter / (n - 1) / n);
  if (values.size() >= kEnoughTraces || !(average.standard_error >= between))
    average.standard_error = between;
  return average;
}

}  // namespace

Figures::Figures(std::span<const ResultRow> rows) {
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
    column.least_tokens = std::min(column.least_tokens, row.budget_tokens);
    column.most_tokens = std::max(column.most_tokens, row.budget_tokens);
  }
  for (Series& series : series_) series.label = label_of(series, series_);
  std::stable_sort(
      budgets_.begin(), budgets_.end(), [](const BudgetColumn& a, const BudgetColumn& b) {
        return std::tie(a.least_tokens, a.most_tokens) < std::tie(b.least_tokens, b.most_tokens);
      });
}

const BudgetColumn* Figures::find_budget(std::string_view text) const {
  for (const BudgetColumn& column : budgets_)
    if (column.text == text) return &column;
  std::uint32_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (error != std::errc{} || end != text.data() + text.size()) return nullptr;
  for (const BudgetColumn& column : budgets_)
    if (column.least_tokens == tokens && column.most_tokens == tokens) return &column;
  return nullptr;
}

std::vector<const ResultRow*> Figures::rows(std::size_t series, std::string_view budget,
                                            std::string_view metric, Scope scope) const {
  const auto found =
      index_.find({series, series_[series].is_full() ? kAll : budget, metric, scope});
  return found == index_.end() ? std::vector<const ResultRow*>{} : found->second;
}

std::optional<Average> Figures::average(std::size_t series, std::string_view budget,
                                        std::string_view metric, Scope scope) const {
  std::vector<double> values, errors;
  for (const ResultRow* row : rows(series, budget, metric, scope)) {
    values.push_back(row->value);
    errors.push_back(row->standard_error);
  }
  if (values.empty()) return std::nullopt;
  return average_of(values, errors);
}

std::optional<Average> Figures::difference(std::size_t a, std::size_t b, std::string_view budget,
                                           std::string_view metric) const {
  std::vector<double> values, errors;
  const auto others = rows(b, budget, metric);
  for (const ResultRow* row : rows(a, budget, metric)) {
    const auto pair = std::find_if(others.begin(), others.end(), [&](const ResultRow* other) {
      return other->trace == row->trace;
    });
    if (pair == others.end()) continue;
    values.push_back(row->value - (*pair)->value);
    errors.push_back(std::hypot(row->standard_error, (*pair)->standard_error));
  }
  if (values.empty()) return std::nullopt;
  return average_of(values, errors);
}

bool is_tie(const Average& difference) {
  if (std::isnan(difference.standard_error)) return difference.mean == 0;
  return std::abs(difference.mean) <= 2 * difference.standard_error;
}

std::vector<Standing> rank_policies(const Figures& figures, std::string_view budget,
                                    const MetricInfo& metric) {
  std::vector<Standing> standings;
  for (std::size_t s = 0; s < figures.series().size(); ++s) {
    const Series& series = figures.series()[s];
    if (series.is_reference() || series.is_full()) continue;
    if (const auto score = figures.average(s, budget, metric.name))
      standings.push_back({s, *score, {}, false});
  }
  std::stable_sort(standings.begin(), standings.end(), [&](const Standing& a, const Standing& b) {
    return metric.higher_is_better ? a.score.mean > b.score.mean : a.score.mean < b.score.mean;
  });
  for (Standing& standing : standings) {
    const std::size_t first = standings.front().series;
    if (standing.series == first) {
      standing.ties = true;
      continue;
    }
    // Absent only where the two share no trace: then nothing can be said, and nothing is claimed.
    const auto behind = figures.difference(standing.series, first, budget, metric.name);
    standing.ties = !behind || is_tie(*behind);
    if (behind) standing.behind = *behind;
  }
  return standings;
}

}  // namespace kvlab
