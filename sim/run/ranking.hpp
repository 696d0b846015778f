// The metrics of a run by policy and budget, averaged over traces, and the ranking of the policies.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "sim/run/comparison.hpp"
#include "sim/run/results.hpp"

namespace kvlab {

/// One curve: a policy with its settings, at all its budgets.
struct Series {
  std::string policy, params, prefill, positions;
  std::uint64_t seed = 0;
  /// The policy's name, with the settings in which this series differs from others of the policy.
  std::string label;

  bool is_oracle() const { return kvlab::is_oracle(policy); }
  bool is_full() const { return policy == "full"; }
};

/// Whether it is useful to compare a metric with that of an oracle: oracle_attention and
/// oracle_topk for attention metrics, oracle_residual for residual errors, belady for fetches. For
/// other metrics, an oracle is neither a bound nor a goal.
bool is_informative(const Series& oracle, std::string_view metric);

/// A budget as requested, and the minimum and maximum of its tokens over the traces.
struct BudgetColumn {
  std::string text;
  std::uint32_t min_tokens, max_tokens;
};

/// The error message for commands that need budgets, if the run has none.
inline constexpr std::string_view kNoBudgetInRun =
    "the run has no budget at which a policy evicts; replay it with some: --budget 128,20%";

/// A mean over traces. For a single trace, the standard error is the one in its row of results.
using Average = Difference;

/// A part of the model: all of it, a layer, or one KV head.
struct Scope {
  std::int32_t layer = -1, head = -1;
  bool operator<(const Scope& other) const {
    return std::tie(layer, head) < std::tie(other.layer, other.head);
  }
};

class MetricTable {
 public:
  /// `rows` must outlive this.
  explicit MetricTable(std::span<const ResultRow> rows);

  const std::vector<Series>& series() const { return series_; }
  /// Ordered by tokens. Does not contain `all`, the budget of `full`.
  const std::vector<BudgetColumn>& budgets() const { return budgets_; }
  const std::vector<std::string>& traces() const { return traces_; }

  /// Finds a budget by its text as requested, or by its number of tokens if it has that number on
  /// every trace. Null if there is none.
  const BudgetColumn* find_budget(std::string_view text) const;
  /// One row for each trace that has such a row. For `full`, the budget is ignored.
  std::vector<const ResultRow*> rows(std::size_t series, std::string_view budget,
                                     std::string_view metric, Scope scope = {}) const;
  std::optional<Average> average(std::size_t series, std::string_view budget,
                                 std::string_view metric, Scope scope = {}) const;
  /// `a` minus `b`, compared in pairs by trace or, for a single trace, by block of queries.
  std::optional<Difference> difference(std::size_t a, std::size_t b, std::string_view budget,
                                       std::string_view metric) const;
  /// Averages of several series over the traces that all of them have. If there are no such traces,
  /// the average of a series is over all traces that the series has.
  struct CommonScores {
    std::vector<Average> averages;  ///< [series]
    /// The last series minus the first; nullopt if they have no trace in common.
    std::optional<Difference> difference;
  };
  /// Each of `series` must have the metric at `budget`.
  CommonScores average_common(std::span<const std::size_t> series, std::string_view budget,
                              std::string_view metric) const;
  /// The memory of a series at a budget; all zeros if the run has no data about memory.
  Memory memory(std::size_t series, std::string_view budget) const;

 private:
  PairedScores paired_scores(std::span<const std::size_t> series, std::string_view budget,
                             std::string_view metric, Scope scope) const;

  using Key = std::tuple<std::size_t, std::string_view, std::string_view, Scope>;

  std::vector<Series> series_;
  std::vector<BudgetColumn> budgets_;
  std::vector<std::string> traces_;
  std::map<Key, std::vector<const ResultRow*>> index_;  // one row for each trace that has one
};

/// One policy's position at a budget.
struct RankedPolicy {
  std::size_t series;
  Average score;
  Difference from_lowest;  ///< its error minus that of the policy with the lowest mean; NaN if it
                           ///< is over the budget
  bool is_similar;   ///< whether its difference from the choice is not significant; true for the
                     ///< choice
  bool over_budget;  ///< whether it is over the budget, so that it is never chosen
  Memory memory;
};

/// The ranking of the policies (without oracles and `full`) at a budget.
struct Ranking {
  /// The eligible policies, lowest mean first, then those over the budget.
  std::vector<RankedPolicy> ranked;
  std::size_t winner = 0;           ///< the choice, an index in `ranked`
  Recommendation recommendation;    ///< its candidates have the order of the run
  std::vector<std::size_t> series;  ///< [candidate of the recommendation]: index of its series

  bool empty() const { return ranked.empty(); }
  const RankedPolicy& first() const { return ranked.front(); }
};

/// Returns an empty ranking if no policy has the metric at `budget`.
Ranking rank_policies(const MetricTable& metric_table, std::string_view budget,
                      const MetricInfo& metric, Frontier frontier = Frontier::compute);

/// The recommendation at each budget that has one, ordered by tokens. `tokens`: number of scored
/// tokens; `note`: what was not measured.
std::vector<Recommendation> recommendations_of(const MetricTable& metric_table,
                                               const MetricInfo& metric, std::uint64_t tokens,
                                               const std::string& note);

}  // namespace kvlab
