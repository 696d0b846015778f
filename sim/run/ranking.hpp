// The metrics of a run, looked up by policy and budget, averaged over traces, and put in order.
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

/// One curve: a policy with its settings, at whatever budgets.
struct Series {
  std::string policy, params, prefill, positions;
  std::uint64_t seed = 0;
  std::string
      label;  ///< the policy, and what sets this series apart from the others of that policy

  bool is_oracle() const { return kvlab::is_oracle(policy); }
  bool is_full() const { return policy == "full"; }
};

/// Whether an oracle says something of a metric: oracle_attention and oracle_topk of attention
/// metrics, oracle_residual of residual errors. For other metrics it is neither a bound nor a goal.
bool informs(const Series& oracle, std::string_view metric);

/// A budget as requested, and what it came to: the fewest and the most tokens over the traces.
struct BudgetColumn {
  std::string text;
  std::uint32_t min_tokens, max_tokens;
};

/// Why a run without any budget cannot answer a question about budgets.
inline constexpr std::string_view kNoBudgetInRun =
    "the run has no budget at which a policy evicts; replay it with some: --budget 128,20%";

/// A mean over traces; of one trace with the error that its row has.
using Average = Difference;

/// Which part of the model: all of it, a layer, or one KV head.
struct Scope {
  std::int32_t layer = -1, head = -1;
  bool operator<(const Scope& other) const {
    return std::tie(layer, head) < std::tie(other.layer, other.head);
  }
};

class MetricTable {
 public:
  /// `rows` must outlive the metrics.
  explicit MetricTable(std::span<const ResultRow> rows);

  const std::vector<Series>& series() const { return series_; }
  /// By tokens; `all` (the budget of `full`) is not among them.
  const std::vector<BudgetColumn>& budgets() const { return budgets_; }
  const std::vector<std::string>& traces() const { return traces_; }

  /// The column that `text` names: as requested, or a number of tokens that every trace resolved it
  /// to.
  const BudgetColumn* find_budget(std::string_view text) const;
  /// The row of each trace that has one; `full` is found under any budget.
  std::vector<const ResultRow*> rows(std::size_t series, std::string_view budget,
                                     std::string_view metric, Scope scope = {}) const;
  std::optional<Average> average(std::size_t series, std::string_view budget,
                                 std::string_view metric, Scope scope = {}) const;
  /// `a` less `b`, paired by trace and, of one trace, by block of queries.
  std::optional<Difference> difference(std::size_t a, std::size_t b, std::string_view budget,
                                       std::string_view metric) const;
  /// Several series over the traces that all of them have; over its own each, where there are none.
  struct InCommon {
    std::vector<Average> averages;         ///< [series]
    std::optional<Difference> difference;  ///< of the last, less the first; none: nothing in common
  };
  /// Each of `series` has the metric at `budget`.
  InCommon in_common(std::span<const std::size_t> series, std::string_view budget,
                     std::string_view metric) const;
  /// What a series holds at a budget; zeros where the run does not say.
  Memory memory(std::size_t series, std::string_view budget) const;

 private:
  PairedScores paired_scores(std::span<const std::size_t> series, std::string_view budget,
                             std::string_view metric, Scope scope) const;

  using Key = std::tuple<std::size_t, std::string_view, std::string_view, Scope>;

  std::vector<Series> series_;
  std::vector<BudgetColumn> budgets_;
  std::vector<std::string> traces_;
  std::map<Key, std::vector<const ResultRow*>> index_;  // [trace that has it]
};

/// One policy's place at a budget.
struct Standing {
  std::size_t series;
  Average score;
  Difference behind;  ///< its error minus that of the lowest mean; NaN where it is over the budget
  bool is_similar;    ///< its difference from the choice is not significant; true for the choice
  bool over_budget;   ///< over the budget: never chosen
  Memory memory;
};

/// The policies (no oracles, not `full`) at a budget.
struct Ranking {
  std::vector<Standing>
      standings;                  ///< eligible ones, lowest mean first; then those over the budget
  std::size_t winner = 0;         ///< the choice, of the standings
  Recommendation recommendation;  ///< its candidates are in the order of the run
  std::vector<std::size_t> series;  ///< [candidate]

  bool empty() const { return standings.empty(); }
  const Standing& first() const { return standings.front(); }
};

/// Empty if no policy has the metric at `budget`.
Ranking rank_policies(const MetricTable& metric_table, std::string_view budget,
                      const MetricInfo& metric, Frontier frontier = Frontier::compute);

/// The recommendation at each budget that has one, by tokens. `tokens`: scored; `note`: what was
/// not measured.
std::vector<Recommendation> recommendations_of(const MetricTable& metric_table,
                                               const MetricInfo& metric, std::uint64_t tokens,
                                               const std::string& note);

}  // namespace kvlab
