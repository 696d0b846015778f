// Answers and their figures as tidy tables.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/task/figures.hpp"

namespace kvlab {

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
