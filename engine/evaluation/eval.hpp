// `kvlab eval`: perplexity and company of a sweep of configurations over texts, in the end-to-end
// evaluation.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/evaluation/eval/score.hpp"

namespace kvlab {

struct EvalOptions {
  std::uint32_t window = 0;          ///< tokens, the first one included; 0: the trained context
  std::vector<std::int32_t> before;  ///< the tokenizer's, put before each window
  bool stream = false;               ///< the whole text as one sequence
  std::uint32_t prompt_tokens = 0;   ///< of each sequence; 0: half of it
  std::uint32_t max_tokens = 0;      ///< of each text; 0: all
  Queries queries = Queries::decode;
  bool against_full = true;        ///< run the full cache too, for kl and same_first
  std::uint32_t block_tokens = 0;  ///< scores by so many tokens, too; 0: not
  unsigned threads = 1;
  std::vector<std::string> names;  ///< of the texts, for errors; or none
  std::function<void(double)> progress;
  LeaveOut leave_out = nullptr;  ///< gets what has too small a budget; null: that is refused
};

/// A sweep runs sequences under every configuration: [sequence][configuration].
using SweepRunner = std::function<std::vector<std::vector<EvalScores>>(
    const std::vector<std::vector<std::int32_t>>& sequences, std::span<const CacheConfig> configs,
    const EvalOptions& options)>;
/// A sweep's sequences one after the other, each by `run`.
std::vector<std::vector<EvalScores>> run_sequences_in_turn(
    const std::vector<std::vector<std::int32_t>>& sequences, const EvalOptions& options,
    const std::function<std::vector<EvalScores>(const std::vector<std::int32_t>& ids,
                                                const SequenceOptions& options)>& run);
/// A sweep by evaluate_by_layers, a thread for each sequence.
SweepRunner layer_sweep_runner(const Model& model);
/// Sweeps by evaluate_by_tokens; `backend` must outlive them.
SweepRunner token_sweep_runner(Backend& backend);

/// Scores `configs` (`full` is put in front if it is not there, and requested) over texts given as
/// token ids without special tokens. Throws std::invalid_argument, for a text of which nothing
/// would be scored before any is run.
Evaluation evaluate(const ModelConfig& config, const SweepRunner& run_sweep,
                    const std::vector<std::vector<std::int32_t>>& texts,
                    std::vector<CacheConfig> configs, const EvalOptions& options);

}  // namespace kvlab
