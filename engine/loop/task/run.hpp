// A task from beginning to end: questions are drawn, answered under every configuration, counted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend.hpp"
#include "engine/loop/task/figures.hpp"
#include "sim/run/comparison.hpp"

namespace kvlab {

// Who answers best at each budget, and what is held meanwhile.

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

struct TaskRequest {
  TaskSpec spec;
  std::vector<std::uint32_t> words{250, 500};
  std::vector<double> depths{0, 0.25, 0.5, 0.75, 1};
  std::uint32_t first_draw = 0;  ///< those before it were asked already
  std::uint32_t draws = 4;       ///< at each length and depth, up to this one
  std::uint64_t seed = 0;
  std::vector<QueryMode> modes{QueryMode::aware, QueryMode::agnostic};
  std::vector<CacheConfig> configs;  ///< `full` is put in front if it is not there
  std::optional<ChatFrame> chat;
  std::string_view text = bundled_haystack();
  bool beyond_context = false;  ///< take prompts longer than the model was trained on
  AnswerOptions answers;
};

/// Throws std::invalid_argument for a text without words, for too many keys, and for prompts longer
/// than what the model was trained on.
TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request);

}  // namespace kvlab
