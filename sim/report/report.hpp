// The page of a run.
#pragma once

#include <string>
#include <vector>

#include "sim/report/page.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

struct ReportOptions {
  /// Budget of heat maps and of the table under the curves, as requested or in tokens. Empty: the
  /// smallest budget at which the choice is significantly better than the runner-up.
  std::string budget;
  std::string folder = "RUN";            ///< folder of the run, for the next command
  std::vector<std::string> tokens = {};  ///< text of the shown trace's tokens; empty: unknown
};

/// The page: recommendations, the metrics by budget, layer and head, what was kept, provenance.
/// Throws std::invalid_argument for a budget that is not in the run.
PageDocument report_page(const Run& run, const ReportOptions& options = {});

/// Writes each metric's curves, the frontier and the deciding metric by head to `folder`, as
/// Vega-Lite and, if they can be drawn, as SVG and PNG. File names are those of results.csv.
/// Returns a text about what is missing, or "". Throws as report_page() does, and
/// std::runtime_error for a run of several models.
std::string write_figures(const Run& run, const std::string& budget, const AtomicFolder& folder);

}  // namespace kvlab
