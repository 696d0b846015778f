// Answers of a model whose cache a policy keeps: many questions under many configurations.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/batch_decoder.hpp"
#include "engine/evaluation/task/sample.hpp"
#include "sim/run/run_folder.hpp"

namespace kvlab {

// Whether an answer is right.

enum class Judgement { open, right, wrong };

/// Judges by exact match: the first numbers (runs of digits) that `said` holds, as many as are
/// expected, must be those expected, in any order; other words do not count. `open`: more text
/// could decide either way. `ended`: no more comes.
Judgement judge(std::string_view said, std::span<const std::string> expected, bool ended);

struct TaskAnswer {
  bool right = false;         ///< by judge(), of greedy decoding
  double log_likelihood = 0;  ///< of the right answer's tokens, in nats
  std::string said;           ///< as far as it decides; no further tokens were decoded
};

struct AnswerOptions {
  std::uint32_t max_new_tokens = 32;     ///< an answer that is still open then is wrong
  std::uint32_t max_rows = 64;           ///< caches side by side
  std::function<void(double)> progress;  ///< may be empty; gets the share that is done
  const RunFolder* kept = nullptr;       ///< where finished answers wait, and are taken up; or none
};

/// Answers [prompt][mode][configuration]. A configuration's budget resolves against the prompt's
/// tokens; the i-th prompt is sequence i random seed. Throws std::invalid_argument for protected
/// tokens that do not fit a budget, std::runtime_error where not even one cache fits the device's
/// memory.
std::vector<std::vector<std::vector<TaskAnswer>>> answer_tasks(BatchBackend& backend,
                                                               const Tokenizer& tokenizer,
                                                               std::span<const TaskPrompt> prompts,
                                                               std::span<const QueryMode> modes,
                                                               std::span<const CacheConfig> configs,
                                                               const AnswerOptions& options);

}  // namespace kvlab
