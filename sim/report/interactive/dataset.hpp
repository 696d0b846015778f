// The metrics of a run as the interactive page reads them (sim/report/page/data.js).
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/run/ranking.hpp"

namespace kvlab {
/// Sequences that are averaged: those of one model.
struct SequenceGroup {
  std::string name;
  std::vector<ResultRow> rows;
};

/// One row of a page's table: what sim/run/comparison.* decided of a series. Pages only draw it.
struct RankedRow {
  std::size_t series;
  Difference behind = {};  ///< its error minus that of the lowest mean
  bool over_budget = false;
};
/// The table at a budget, in its order.
struct RankedTable {
  std::vector<RankedRow> rows;
  std::size_t choice = 0;  ///< a series
};
/// By budget, of what an evaluation decided over its tokens.
using RankedTables = std::map<std::string, RankedTable>;

struct DatasetOptions {
  std::string headline;             ///< the metric to begin with
  RankedTables decided = {};        ///< by the headline metric; empty: by rank_policies()
  std::string budget;               ///< the budget to begin with, as requested
  std::vector<MetricInfo> metrics;  ///< those that are shown, in their order
  /// Whether a series may be drawn as a line: oracle_topk only where it is a bound.
  std::vector<bool> drawn;  ///< by series; empty: all
  std::size_t byte_limit =
      2'300'000;  ///< bytes for the numbers; beyond, heads lose digits and errors first
};

/// What the page chooses from and draws. `groups` must hold the same series and budgets as
/// `figures`, which is of all their rows.
nlohmann::ordered_json dataset_of(const MetricTable& metric_table,
                                  const std::vector<SeriesStyle>& styles,
                                  std::span<const SequenceGroup> groups,
                                  const DatasetOptions& options);

// The interactive page's scripts: Vega, our own (sim/report/page/), and what they show.

// Vega, the library that draws pages: found where Debian's libjs-vega puts it.

/// What to say where vega_script() finds nothing.
inline constexpr std::string_view kNoVega =
    "the page has tables and no figures, for want of Vega (Debian: libjs-vega; elsewhere: its "
    "folder as KVLAB_VEGA)";

/// Vega's modules as one script behind their licence. From the folder that the environment's
/// KVLAB_VEGA names, or else the one in the Python package, or else Debian's. Nothing if a module
/// is missing.
std::optional<std::string> vega_script();

/// A file of sim/report/page/, by its name. Throws std::out_of_range if there is none.
std::string_view page_file(std::string_view name);

/// The elements that end an interactive page: `data` as JSON that no text in it can leave, then the
/// scripts. `vega` is what vega_script() gave.
std::string script_elements(const nlohmann::ordered_json& data, std::string_view vega);

}  // namespace kvlab
