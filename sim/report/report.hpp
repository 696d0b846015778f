// The page of a run: one HTML file that needs nothing else.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "sim/run/run.hpp"

namespace kvlab {

struct ReportOptions {
  std::string budget;  ///< of heat maps and the headline, as asked or in tokens; empty: the run's
                       ///< middle one
  bool fixed = false;  ///< pictures by gnuplot and no script, even where there is Vega
  std::vector<std::string> tokens = {};  ///< text of the shown trace's tokens; empty: not known
  std::function<void(double)> progress;  ///< called with the fraction done; may be empty
};

/// Question, answer, curves, heat maps, what was kept, all figures, provenance. Throws
/// std::invalid_argument for a budget that is not in the run; std::runtime_error without gnuplot.
std::string report_html(const Run& run, const ReportOptions& options = {});

/// The same figures as SVG and PNG, each with its own colours and labels, in `directory`, which is
/// made; and results.csv's own words for their names. Throws as report_html, and
/// std::invalid_argument for a run of several models.
void write_figures(const Run& run, const std::string& budget,
                   const std::filesystem::path& directory);

}  // namespace kvlab
