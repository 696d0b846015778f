// Who answers best at each budget, and what is held meanwhile.
#pragma once

#include <string>
#include <vector>

#include "engine/loop/task/table.hpp"
#include "sim/run/comparison.hpp"

namespace kvlab {

/// What a configuration holds while prompts are answered: mean of the prompts, the most of one.
/// [mode][configuration].
std::vector<std::vector<Memory>> task_memory(const TaskRun& run, const CacheShape& model);

/// TaskRun::memory as figures over all lengths and depths.
std::vector<TaskFigure> memory_figures(const TaskRun& run);

/// The verdict on right answers of one mode at one budget, as asked.
struct TaskVerdict {
  std::string budget;
  std::vector<std::size_t> configs;  ///< [contender]
  std::vector<Contender> contenders;
  Verdict verdict;
  VerdictScope scope;
};
/// Of each budget at which configurations evict. Shares are paired over the same draws.
std::vector<TaskVerdict> task_verdicts(const TaskRun& run, std::size_t mode);

}  // namespace kvlab
