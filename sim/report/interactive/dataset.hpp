// The figures of a run as the interactive page reads them (sim/report/page/data.js).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "sim/report/palette.hpp"
#include "sim/run/ranking.hpp"

namespace kvlab {

/// Sequences that are averaged: those of one model.
struct SequenceGroup {
  std::string name;
  std::vector<ResultRow> rows;
};

struct DatasetOptions {
  std::string headline;             ///< the metric to begin with
  std::string budget;               ///< the budget to begin with, as asked
  std::vector<MetricInfo> metrics;  ///< those that are shown, in their order
  /// Whether a series may be drawn as a line: oracle_topk only where it is a bound.
  std::vector<bool> drawn;  ///< by series; empty: all
  std::size_t room =
      2'300'000;  ///< bytes for the numbers; beyond, heads lose digits and errors first
};

/// What the page chooses from and draws. `groups` must hold the same series and budgets as
/// `figures`, which is of all their rows.
nlohmann::ordered_json dataset_of(const Figures& figures, const std::vector<SeriesStyle>& styles,
                                  std::span<const SequenceGroup> groups,
                                  const DatasetOptions& options);

}  // namespace kvlab
