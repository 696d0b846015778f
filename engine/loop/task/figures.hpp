// Figures of many answers: by length and depth, with intervals, paired with the first
// configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/statistics.hpp"
#include "engine/loop/task/answers.hpp"
#include "engine/loop/task/draw.hpp"

namespace kvlab {

/// Wilson's score interval for a share: all probabilities from which `hits` of `count` is less than
/// 1.96 standard errors away; 95%. [0, 1] for no draws.
Interval wilson_interval(std::uint64_t hits, std::uint64_t count);

/// One figure.
///   exact_match: share of right answers
///   lost: of those that the first configuration answers right, the share that this one does not
///   gained: of those that the first one does not, the share that this one answers right
///     (all three with wilson_interval())
///   log_likelihood: of the right answer, mean of the draws, nats
///   log_likelihood_change: from the first configuration's, mean over the same draws
///     (both as PairedScores has them: NaN for fewer than eight draws)
struct TaskFigure {
  std::size_t config;
  QueryMode mode;
  std::optional<std::uint32_t> words;  ///< none: all
  std::optional<double> depth;         ///< likewise
  std::string_view metric;
  double value;
  Interval interval;
  std::uint64_t count;  ///< answers
};

/// All figures of answers [prompt][mode][configuration], `places` [prompt]: by configuration, mode,
/// length and depth, and over all of each. What has no answers to count has no figure.
std::vector<TaskFigure> task_figures(std::span<const std::vector<std::vector<TaskAnswer>>> answers,
                                     std::span<const TaskPlace> places,
                                     std::span<const QueryMode> modes);

// Answers and their figures as tidy tables.

/// What the tables are of.
struct TaskRun {
  std::string task;  ///< TaskSpec::text()
  std::vector<CacheConfig> configs;
  std::vector<QueryMode> modes;
  std::vector<TaskPlace> places;     ///< [prompt]
  std::vector<std::uint32_t> draws;  ///< [prompt]: which draw of its place
  std::vector<TaskPrompt> prompts;
  std::vector<std::vector<std::vector<TaskAnswer>>> answers;  ///< [prompt][mode][configuration]
  std::vector<std::vector<Memory>> memory;                    ///< [mode][configuration]
};

/// "25%", "33.3%".
std::string depth_text(double depth);

/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,metric,value,low,high,count:
/// one figure a row; an interval that there is not is empty.
std::string task_figures_csv(const TaskRun& run, std::span<const TaskFigure> figures);
/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,draw,expected,said,right,
/// log_likelihood: one answer a row.
std::string task_answers_csv(const TaskRun& run);

}  // namespace kvlab
