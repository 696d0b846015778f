// Lets a model answer many questions under many configurations.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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

/// The share of the expected strings that `said` contains, ignoring case. This is
/// RULER's string_match_all for one sample.
double found_share(std::string_view said, std::span<const std::string> expected);

struct TaskAnswer {
  /// With greedy decoding: by judge() or, for Matching::strings, whether all strings were found.
  bool right = false;
  double log_likelihood = 0;  ///< log-likelihood of the right answer's tokens, in nats
  std::string said;  ///< the answer up to the point where it is decided; decoding stops there
  std::optional<double> found = {};  ///< for Matching::strings: found_share()
};

struct AnswerOptions {
  std::uint32_t max_new_tokens = 32;  ///< maximum number of tokens of an answer, unless the prompt
                                      ///< has its own maximum; an answer that is undecided at the
                                      ///< maximum is wrong
  std::uint32_t max_rows = 64;        ///< caches in a batch
  std::function<void(double)> progress;  ///< gets the fraction done, 0 to 1; may be empty
  const RunFolder* kept =
      nullptr;  ///< folder of finished answers, from which an interrupted run resumes; may be null

  /// The maximum number of tokens of the answer to a prompt.
  std::uint32_t limit(const TaskPrompt& prompt) const {
    return prompt.max_new_tokens > 0 ? prompt.max_new_tokens : max_new_tokens;
  }
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
