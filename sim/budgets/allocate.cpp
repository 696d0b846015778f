#include "sim/budgets/allocate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "sim/run/ranking.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMinBudgets = 3;
constexpr std::string_view kAllocators[] = {"kl_estimate", "residual_error"};

/// Decrease of the error per additional token from `a` to `b`.
double fall(const CurvePoint& a, const CurvePoint& b) {
  return (a.error - b.error) / static_cast<double>(b.tokens - a.tokens);
}

std::vector<std::size_t> policies_of(const MetricTable& metric_table) {
  std::vector<std::size_t> found;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s)
    if (!metric_table.series()[s].is_oracle() && !metric_table.series()[s].is_full())
      found.push_back(s);
  return found;
}

std::size_t series_of(const MetricTable& metric_table, const std::string& policy) {
  std::vector<std::size_t> named;
  std::vector<std::string> known;
  for (const std::size_t s : policies_of(metric_table)) {
    const Series& series = metric_table.series()[s];
    known.push_back(series.label);
    if (series.label == policy) return s;
    if (policy.empty() || series.policy == policy) named.push_back(s);
  }
  if (named.size() == 1) return named.front();
  if (known.empty())
    throw std::invalid_argument(
        "the run has no policy that evicts, so there is nothing to allocate; replay one, such as "
        "h2o");
  throw std::invalid_argument(fmt::format(
      "--policy: {}; give one of {}",
      named.empty() ? fmt::format("{} is not in this run", policy.empty() ? "a policy" : policy)
                    : fmt::format("it matches {} configurations of the run", named.size()),
      fmt::join(known, ", ")));
}

std::string metric_of(const MetricTable& metric_table, std::size_t series,
                      const std::string& requested) {
  const auto has = [&](std::string_view metric) {
    return std::ranges::any_of(metric_table.budgets(), [&](const BudgetColumn& budget) {
      return metric_table.average(series, budget.text, metric, {0, 0}).has_value() ||
             metric_table.average(series, budget.text, metric).has_value();
    });
  };
  if (!requested.empty() && std::ranges::find(kAllocators, requested) == std::end(kAllocators))
    throw std::invalid_argument(
        fmt::format("--metric: '{}' should be one of {}", requested, fmt::join(kAllocators, ", ")));
  for (const std::string_view metric : kAllocators)
    if ((requested.empty() || requested == metric) && has(metric)) return std::string(metric);
  throw std::invalid_argument(fmt::format(
      "the run has no {}; replay a trace with {}",
      requested.empty() ? fmt::format("{}", fmt::join(kAllocators, " and no ")) : requested,
      requested == kAllocators[0] ? "gradients (python -m kvlab.hf sensitivities)"
                                  : "residual norms and a sketch (`kvlab capture` writes both)"));
}

/// The setting of `params` that begins with `name`, such as tiers=4 for "tiers="; empty: none.
std::string setting_of(const std::string& params, std::string_view name) {
  for (const std::string& setting : split_list(params, ':'))
    if (setting.starts_with(name)) return setting;
  return "";
}

/// The series whose error a policy has if a head keeps all tokens: `full` with the same tiers.
/// nullopt for a policy without tiers, whose error is then 0. Throws if the run lacks that `full`.
std::optional<std::size_t> full_of(const MetricTable& metric_table, std::size_t series,
                                   const std::string& metric) {
  const Series& own = metric_table.series()[series];
  const std::string tiers = setting_of(own.params, "tiers="),
                    centre = setting_of(own.params, "centre=");
  if (tiers.empty()) return std::nullopt;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& other = metric_table.series()[s];
    if (other.is_full() && setting_of(other.params, "tiers=") == tiers &&
        setting_of(other.params, "centre=") == centre && metric_table.average(s, "all", metric))
      return s;
  }
  throw std::invalid_argument(
      fmt::format("--policy: {} has an error even if it keeps all tokens, because of {}, and the "
                  "run has no {} of `full` with the same tiers; replay `full` too if they are one "
                  "format, or plan budgets from the policy without tiers",
                  own.label, tiers, metric));
}

/// The length of the traces in tokens. Throws if their lengths differ.
std::uint32_t common_length(const RunInfo& info) {
  for (const RunTrace& trace : info.traces)
    if (trace.tokens != info.traces.front().tokens)
      throw std::invalid_argument(fmt::format(
          "the traces {} and {} have {} and {} tokens; allocate from one trace, or from traces of "
          "the same length",
          info.traces.front().name, trace.name, info.traces.front().tokens, trace.tokens));
  return info.traces.front().tokens;
}

/// The budgets that are the same for all heads and below the trace's length, and at which the
/// series has the metric.
std::vector<BudgetColumn> even_budgets(const MetricTable& metric_table, std::size_t series,
                                       const std::string& metric, std::uint32_t length) {
  std::vector<BudgetColumn> budgets;
  for (const BudgetColumn& column : metric_table.budgets()) {
    const bool even = !column.text.starts_with('@') && parse_budget(column.text).is_even();
    const bool again = !budgets.empty() && budgets.back().min_tokens == column.min_tokens;
    if (even && !again && column.min_tokens < length &&
        metric_table.average(series, column.text, metric))
      budgets.push_back(column);
  }
  if (budgets.size() < kMinBudgets)
    throw std::invalid_argument(fmt::format(
        "the run has {} of {} at {} budgets below the trace's length, but a curve needs "
        "at least {}; run kvlab replay --budget 5%,10%,20%,40%",
        metric, metric_table.series()[series].label, budgets.size(), kMinBudgets));
  return budgets;
}

/// `full`: the series that gives the error at the full length; nullopt: that error is 0.
Curve curve_of(const MetricTable& metric_table, std::size_t series, std::optional<std::size_t> full,
               const std::string& metric, const std::vector<BudgetColumn>& budgets,
               std::uint32_t length, Scope head) {
  const auto error = [&](std::size_t s, const std::string& budget) {
    const auto average = metric_table.average(s, budget, metric, head);
    if (!average)
      throw std::invalid_argument(
          fmt::format("the run has no {} of layer {}, KV head {}", metric, head.layer, head.head));
    return average->mean;
  };
  Curve curve;
  for (const BudgetColumn& budget : budgets)
    curve.push_back({budget.min_tokens, error(series, budget.text)});
  curve.push_back({length, full ? error(*full, "all") : 0});
  return curve;
}

}  // namespace

Curve lower_hull(const Curve& curve) {
  Curve hull;
  for (const CurvePoint& point : curve) {
    while (hull.size() > 1 && fall(hull[hull.size() - 2], hull.back()) <= fall(hull.back(), point))
      hull.pop_back();
    hull.push_back(point);
  }
  return hull;
}

double error_at(const Curve& hull, std::uint32_t tokens) {
  for (std::size_t i = 1; i < hull.size(); ++i)
    if (tokens <= hull[i].tokens)
      return hull[i - 1].error - fall(hull[i - 1], hull[i]) * (tokens - hull[i - 1].tokens);
  return hull.back().error;
}

std::vector<std::uint32_t> share_tokens(std::span<const Curve> hulls, std::uint64_t total) {
  struct Piece {
    std::size_t curve, point;  // indices of the curve, and of the point at which the segment begins
    double fall;
  };
  std::vector<Piece> pieces;
  std::vector<std::uint32_t> tokens;
  std::uint64_t max_total = 0;
  for (std::size_t c = 0; c < hulls.size(); ++c) {
    tokens.push_back(hulls[c].front().tokens);
    max_total += hulls[c].back().tokens;
    for (std::size_t i = 0; i + 1 < hulls[c].size(); ++i)
      pieces.push_back({c, i, fall(hulls[c][i], hulls[c][i + 1])});
  }
  const std::uint64_t min_total = std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0});
  if (total < min_total || total > max_total)
    throw std::invalid_argument(
        fmt::format("--budget: {} tokens over all heads; should be from {} to {}, the range that "
                    "the run measured",
                    total, min_total, max_total));
  std::ranges::stable_sort(pieces, [](const Piece& a, const Piece& b) { return a.fall > b.fall; });
  std::uint64_t left = total - min_total;
  for (const Piece& piece : pieces) {
    const Curve& hull = hulls[piece.curve];
    const std::uint64_t length = hull[piece.point + 1].tokens - hull[piece.point].tokens;
    const std::uint64_t taken = std::min(left, length);
    tokens[piece.curve] += static_cast<std::uint32_t>(taken);
    left -= taken;
  }
  return tokens;
}

Allocation allocate_budgets(const Run& run, const AllocationRequest& request) {
  if (!run.info.layers.empty())
    throw std::invalid_argument("the run has only some of the layers; replay all of them");
  refuse_several_models(run.info, "plan budgets");
  const MetricTable metric_table(run.rows);
  if (metric_table.budgets().empty()) throw std::invalid_argument(std::string(kNoBudgetInRun));
  const RunTrace& trace = run.info.traces.front();
  const std::uint32_t length = common_length(run.info);
  const std::size_t series = series_of(metric_table, request.policy);
  Allocation result{.policy = metric_table.series()[series].label,
                    .metric = metric_of(metric_table, series, request.metric),
                    .mean_tokens = request.budget.resolve(length, 0)};
  const auto budgets = even_budgets(metric_table, series, result.metric, length);
  if (result.mean_tokens < budgets.front().min_tokens || result.mean_tokens > length)
    throw std::invalid_argument(fmt::format(
        "--budget: {} is {} tokens; should be from {}, the run's smallest budget, to {}",
        request.budget.text(), result.mean_tokens, budgets.front().min_tokens, length));
  const auto full = full_of(metric_table, series, result.metric);
  std::vector<Curve> hulls;
  for (std::uint32_t layer = 0; layer < trace.layers; ++layer) {
    result.layers.push_back(trace.number(layer));
    for (std::int32_t head = 0; head < static_cast<std::int32_t>(trace.kv_heads); ++head)
      hulls.push_back(
          lower_hull(curve_of(metric_table, series, full, result.metric, budgets, length,
                              {static_cast<std::int32_t>(trace.number(layer)), head})));
  }
  const auto tokens = share_tokens(hulls, std::uint64_t{result.mean_tokens} * hulls.size());
  for (std::size_t i = 0; i < hulls.size(); ++i) {
    if (i % trace.kv_heads == 0) result.heads.emplace_back();
    result.heads.back().push_back(tokens[i]);
    result.even += error_at(hulls[i], result.mean_tokens);
    result.shared += error_at(hulls[i], tokens[i]);
  }
  return result;
}

}  // namespace kvlab
