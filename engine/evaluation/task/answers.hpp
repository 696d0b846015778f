// Lets a model answer many questions under many configurations.
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

// Judges answers.

enum class Judgement { open, right, wrong };

/// Judges by exact match: the first numbers (runs of digits) in `said`, as many as are expected,
/// must be the expected numbers, in any order. Other words do not count. `open`: more text could
/// change the result. `ended`: no more text follows.
Judgement judge(std::string_view said, std::span<const std::string> expected, bool ended);

struct TaskAnswer {
  bool right = false;         ///< by judge(), with greedy decoding
  double log_likelihood = 0;  ///< log-likelihood of the right answer's tokens, in nats
  std::string said;  ///< the answer up to the point where it is decided; decoding stops there
};

struct AnswerOptions {
  std::uint32_t max_new_tokens =
      32;  ///< maximum number of tokens of an answer; an answer that is still open then is wrong
  std::uint32_t max_rows = 64;           ///< caches in a batch
  std::function<void(double)> progress;  ///< gets the fraction done, 0 to 1; may be empty
  const RunFolder* kept =
      nullptr;  ///< folder of finished answers, from which an interrupted run resumes; may be null
};

/// Returns answers [prompt][mode][configuration]. A configuration's budget is resolved for the
/// prompt's length. For policies with random numbers, the i-th prompt is sequence i. Throws
/// std::invalid_argument if protected tokens do not fit a budget, and std::runtime_error if not
/// even one cache fits into the device's memory.
std::vector<std::vector<std::vector<TaskAnswer>>> answer_tasks(BatchBackend& backend,
                                                               const Tokenizer& tokenizer,
                                                               std::span<const TaskPrompt> prompts,
                                                               std::span<const QueryMode> modes,
                                                               std::span<const CacheConfig> configs,
                                                               const AnswerOptions& options);

}  // namespace kvlab
