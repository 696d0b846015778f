// Reads the results of a replay, an evaluation or a task as one kind of rows, for pages and
// comparisons.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/report/interactive/dataset.hpp"

namespace kvlab {

inline constexpr const char* kTaskJson = "task.json";

/// The metrics of one folder. Each group belongs to one model and, for a task, to one length and
/// depth. The first group of a task covers all lengths and depths.
struct ScoreSet {
  std::string kind;  ///< "replay", "evaluation" or "task"
  std::string name;  ///< name of the folder
  std::vector<SequenceGroup> groups;
  std::vector<MetricInfo> metrics;
  std::string headline;   ///< the metric by which policies are ranked
  std::string sequences;  ///< what the metrics were measured on, for people to read
  /// Which of the sequences' queries, tokens or samples were scored, for people to read. Rows of
  /// two sets are paired only if both scored the same ones.
  std::string scored = {};
  std::string note;  ///< for example "offline replay"
  /// eval.json or task.json and its path; null for a replay.
  std::shared_ptr<const nlohmann::json> file = {};
  std::string path = {};
  /// The recommendations that an evaluation stored, and the series of each candidate. Empty if
  /// there are none; recommendations_for() then computes recommendations.
  std::vector<Recommendation> recommendations = {};
  std::vector<std::vector<Series>> recommended = {};
};

/// Reads a folder. Throws std::runtime_error that names the folder or file if it is none of the
/// three kinds, or damaged.
ScoreSet load_scores(const std::filesystem::path& folder);

/// The rows of all groups, one group after another.
std::vector<ResultRow> all_rows(const ScoreSet& set);

/// The recommendation at each budget by `metric`. Uses only the first group, which for a task
/// covers all lengths and depths.
std::vector<Recommendation> recommendations_for(const ScoreSet& set, const MetricInfo& metric);

/// The part of a page's data that a reader can explore: every metric by series and budget, and the
/// figure of error against memory.
nlohmann::ordered_json explorer_data(const ScoreSet& set);

/// Figures of every metric against the budget, and of the frontier. They show only the first group,
/// which for a task covers all lengths and depths.
std::vector<Figure> figures_of(const ScoreSet& set);

}  // namespace kvlab
