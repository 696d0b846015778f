// Compares several runs, evaluations or tasks.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/evaluation/scores.hpp"
#include "sim/report/page.hpp"

namespace kvlab {

/// One configuration at one budget, in each of the runs that have it.
struct ComparedRow {
  std::string group, policy, budget;
  std::vector<std::optional<Average>> scores;  ///< [run]
  /// The last run minus the first; nullopt if one of them lacks the configuration, or if they
  /// scored nothing in common.
  std::optional<Difference> difference;

  bool is_in_first_and_last() const { return scores.front() && scores.back(); }
};

/// The row's difference as text, such as "0.010 (-0.002, 0.022), not significant".
std::string compared_text(const ComparedRow& row);

/// A comparison of several runs. Results of different models are not averaged.
struct Comparison {
  ScoreSet together;  ///< the rows of all runs; a series' parameters contain the name of its run
  std::vector<std::string> names;  ///< names of the runs, all different
  std::string metric;
  std::vector<ComparedRow> rows;  ///< configurations that at least two runs have
  std::string warning;            ///< a sentence if the runs used different texts; otherwise empty
  std::vector<std::vector<Recommendation>> recommendations = {};  ///< [run][budget]
};

/// Compares the sets by `metric`. If `metric` is empty, takes the deciding metric of the first set
/// if all sets have that metric, else the deciding metric of the second set, and so on. If no
/// deciding metric is in all sets, takes the first metric that is. Throws std::invalid_argument if
/// there are fewer than two sets, if they are of different kinds, or if a set lacks the metric.
Comparison compare(std::vector<ScoreSet> sets, const std::string& metric);

/// What `kvlab compare --json` prints.
nlohmann::ordered_json comparison_json(const Comparison& comparison);
PageDocument compare_page(const Comparison& comparison);

}  // namespace kvlab
