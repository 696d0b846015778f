// What a replay, an evaluation or a task left behind, as the same rows: for pages and comparisons.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/report/interactive/dataset.hpp"

namespace kvlab {

inline constexpr const char* kTaskJson = "task.json";

/// The metrics of one folder. Each group is of one model, at one place of a task.
struct ScoreSet {
  std::string kind;  ///< "replay", "evaluation" or "task"
  std::string name;  ///< the folder's
  std::vector<SequenceGroup> groups;
  std::vector<MetricInfo> metrics;
  std::string headline;   ///< the metric that decides
  std::string sequences;  ///< what it was measured on, for people
  std::string note;       ///< "offline replay", say
  /// What an evaluation decided over its tokens, and the series of each candidate; empty: what
  /// recommendations_for() computes.
  std::vector<Recommendation> recommendations = {};
  std::vector<std::vector<Series>> recommended = {};
};

/// Throws std::runtime_error that names the folder or file: none of the three, or damaged.
ScoreSet load_scores(const std::filesystem::path& folder);

/// The rows of every group, one after another.
std::vector<ResultRow> all_rows(const ScoreSet& set);

/// What to choose at each budget, by `metric`: of the first group, which is over all.
std::vector<Recommendation> recommendations_for(const ScoreSet& set, const MetricInfo& metric);
/// The colour of each of its candidates.
std::function<std::string(const std::string&)> colours_for(const ScoreSet& set);

/// Sections of a page about figures, and what its scripts draw: what html_page() takes.
struct Explorer {
  std::string sections;
  nlohmann::ordered_json data;
};
/// `heading` is HTML.
Explorer explorer_of(const ScoreSet& set, std::string_view heading);

/// Every metric against the budget, and the frontier: of the first group, which is over all.
std::vector<Figure> figures_of(const ScoreSet& set);

}  // namespace kvlab
