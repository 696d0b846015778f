// The metrics of a run in the form that the interactive page reads (sim/report/page/data.js).
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/run/ranking.hpp"

namespace kvlab {
/// The results of one model. The page averages over its sequences.
struct SequenceGroup {
  std::string name;
  std::vector<ResultRow> rows;
};

/// One row of a page's table: the result of sim/run/comparison.* for a series. Pages compute no
/// comparisons; they only draw these results.
struct RankedRow {
  std::size_t series;
  Difference from_lowest = {};  ///< its error minus the error of the series with the lowest mean
  bool over_budget = false;
};
/// The table at a budget, with its rows in display order.
struct RankedTable {
  std::vector<RankedRow> rows;
  std::size_t choice = 0;  ///< index of a series
};
/// Tables by budget. An end-to-end evaluation computes them from its scores of each token.
using RankedTables = std::map<std::string, RankedTable>;

struct DatasetOptions {
  std::string headline;  ///< metric shown first
  /// The tables of the headline metric, if they are known already. If empty, rank_policies()
  /// computes them.
  RankedTables decided = {};
  std::string budget;               ///< budget shown first, as requested
  std::vector<MetricInfo> metrics;  ///< the metrics to show, in order
  /// Whether a series may be drawn as a line. oracle_topk is drawn only if it is a bound in this
  /// run.
  std::vector<bool> drawn;  ///< by series; empty: all
  /// Maximum number of bytes for the numbers of the page. If there are more, the page leaves out,
  /// step by step: bookkeeping metrics by head and the last digits of values by head; then the last
  /// digits of values by layer and the standard errors of values by head; then all values by head.
  std::size_t byte_limit = 2'300'000;
};

/// The data of the page, from which the reader selects what is drawn. `metric_table` must be made
/// from the rows of all `groups`. A group may lack some of its series and budgets.
nlohmann::ordered_json dataset_of(const MetricTable& metric_table,
                                  const std::vector<SeriesStyle>& styles,
                                  std::span<const SequenceGroup> groups,
                                  const DatasetOptions& options);

}  // namespace kvlab
