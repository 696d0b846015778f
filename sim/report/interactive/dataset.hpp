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

/// One row of a page's table: what sim/run/comparison.* decided about a series. Pages only draw it.
struct RankedRow {
  std::size_t series;
  Difference behind = {};  ///< its error minus that of the lowest mean
  bool over_budget = false;
};
/// The table at a budget, in display order.
struct RankedTable {
  std::vector<RankedRow> rows;
  std::size_t choice = 0;  ///< index of a series
};
/// By budget: the table that an evaluation computed from its tokens.
using RankedTables = std::map<std::string, RankedTable>;

struct DatasetOptions {
  std::string headline;  ///< metric shown first
  RankedTables decided =
      {};  ///< what was decided, for the headline metric; empty: rank_policies() decides
  std::string budget;               ///< budget shown first, as requested
  std::vector<MetricInfo> metrics;  ///< the metrics to show, in order
  /// Whether a series may be drawn as a line. oracle_topk is drawn only where it is a bound.
  std::vector<bool> drawn;  ///< by series; empty: all
  /// Maximum number of bytes for the numbers. If there are more, the values of heads lose digits,
  /// errors first.
  std::size_t byte_limit = 2'300'000;
};

/// The data that the page selects from and draws. `groups` must have the same series and budgets as
/// `metric_table`, which covers all their rows.
nlohmann::ordered_json dataset_of(const MetricTable& metric_table,
                                  const std::vector<SeriesStyle>& styles,
                                  std::span<const SequenceGroup> groups,
                                  const DatasetOptions& options);

}  // namespace kvlab
