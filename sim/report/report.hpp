// The page of a run: one HTML file that needs nothing else.
#pragma once

#include <string>
#include <vector>

#include "sim/run/run.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

struct ReportOptions {
  std::string budget;  ///< of heat maps and the table under the curves, as requested or in tokens;
                       ///< empty: the smallest whose choice is significantly better
  std::string folder = "RUN";            ///< of the run, in the next command
  std::vector<std::string> tokens = {};  ///< text of the shown trace's tokens; empty: not known
};

/// Question, answer, curves, heat maps, what was kept, all metrics, provenance. Throws
/// std::invalid_argument for a budget that is not in the run.
std::string report_html(const Run& run, const ReportOptions& options = {});

/// Each metric's curves, the frontier and the deciding metric by head as Vega-Lite and, where that
/// can be drawn, SVG and PNG, in `folder`; their names are results.csv's own. Returns what is
/// missing. Throws as report_html, and std::runtime_error for a run of several models.
std::string write_figures(const Run& run, const std::string& budget, const AtomicFolder& folder);

}  // namespace kvlab
