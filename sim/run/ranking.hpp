// The figures of a run, looked up by policy and budget, averaged over traces, and put in order.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "sim/run/results.hpp"

namespace kvlab {

/// One curve: a policy with its settings, at whatever budgets.
struct Series {
  std::string policy, params, prefill, positions;
  std::uint64_t seed = 0;
  std::string
      label;  ///< the policy, and what sets this series apart from the others of that policy

  bool is_reference() const { return kvlab::is_reference(policy); }
  bool is_full() const { return policy == "full"; }
};

/// A budget as asked for, and what it came to: the fewest and the most tokens over the traces.
struct BudgetColumn {
  std::string text;
  std::uint32_t least_tokens, most_tokens;
};

/// A mean over traces. From eight traces on, the standard error is that of their scatter; with
/// fewer, the larger of that and what the traces' own errors give; NaN where neither is known.
struct Average {
  double mean = 0, standard_error = 0;
  std::size_t traces = 0;
};

/// Which part of the model: all of it, a layer, or one KV head.
struct Scope {
  std::int32_t layer = -1, head = -1;
  bool operator<(const Scope& other) const {
    return std::tie(layer, head) < std::tie(other.layer, other.head);
  }
};

class Figures {
 public:
  /// `rows` must outlive the figures.
  explicit Figures(std::span<const ResultRow> rows);

  const std::vector<Series>& series() const { return series_; }
  /// By tokens; `all` (the budget of `full`) is not among them.
  const std::vector<BudgetColumn>& budgets() const { return budgets_; }
  const std::vector<std::string>& traces() const { return traces_; }

  /// The column that `text` names: as asked, or a number of tokens that every trace resolved it to.
  const BudgetColumn* find_budget(std::string_view text) const;
  /// The row of each trace that has one; `full` is found under any budget.
  std::vector<const ResultRow*> rows(std::size_t series, std::string_view budget,
                                     std::string_view metric, Scope scope = {}) const;
  std::optional<Average> average(std::size_t series, std::string_view budget,
                                 std::string_view metric, Scope scope = {}) const;
  /// `a` less `b`, paired by trace. The errors within a trace count as independent, which
  /// overstates the error of a difference taken over the same queries.
  std::optional<Average> difference(std::size_t a, std::size_t b, std::string_view budget,
                                    std::string_view metric) const;

 private:
  using Key = std::tuple<std::size_t, std::string_view, std::string_view, Scope>;

  std::vector<Series> series_;
  std::vector<BudgetColumn> budgets_;
  std::vector<std::string> traces_;
  std::map<Key, std::vector<const ResultRow*>> index_;  // [trace that has it]
};

/// |difference| <= 2 standard errors. Where no error is known, only equal figures tie.
bool is_tie(const Average& difference);

/// One policy's place at a budget.
struct Standing {
  std::size_t series;
  Average score;
  Average behind;  ///< how much worse than the first, paired by trace; 0 for the first itself
  bool ties;       ///< with the first; true for the first itself
};

/// The policies (no references, not `full`) at `budget`, the best first. Equal means keep the order
/// of the run. Empty if none has the metric there.
std::vector<Standing> rank_policies(const Figures& figures, std::string_view budget,
                                    const MetricInfo& metric);

}  // namespace kvlab
