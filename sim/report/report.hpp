// The page of a run.
#pragma once

#include <string>
#include <vector>

#include "sim/report/page.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

struct ReportOptions {
  /// Budget of the heat maps and of the table below the curves, as requested in the replay or in
  /// tokens. If empty, the budget that decisive_budget() chooses.
  std::string budget;
  std::string folder = "RUN";  ///< folder of the run, for the command that the page suggests next
  /// Text of each token of the trace whose kept tokens are shown; empty: unknown.
  std::vector<std::string> tokens = {};
};

/// The page of a run. It shows the recommendations, the metrics by budget, layer and head, the kept
/// tokens, and the provenance of the run. Throws std::invalid_argument for a budget that is not in
/// the run.
PageDocument report_page(const Run& run, const ReportOptions& options = {});

/// Writes three kinds of figures to `folder`: the curves of each metric, the frontier, and the
/// deciding metric by head. They are written as Vega-Lite and, if vl-convert is available, as SVG
/// and PNG. A file is named after its metric in results.csv. Returns a message about files that
/// could not be made, or "". Throws as report_page() does, and std::runtime_error for a run of
/// several models.
std::string write_figures(const Run& run, const std::string& budget, const AtomicFolder& folder);

}  // namespace kvlab
