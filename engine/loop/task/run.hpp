// A task from beginning to end: questions are drawn, answered under every configuration, counted.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/backend.hpp"
#include "engine/loop/task/table.hpp"

namespace kvlab {

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
