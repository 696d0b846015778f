// `kvlab eval`: perplexity, KL and top-1 agreement of a sweep of configurations over texts, in the
// end-to-end evaluation.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/evaluation/eval/score.hpp"

namespace kvlab {

struct EvalOptions {
  std::uint32_t window = 0;          ///< length of a window in tokens; 0: the trained context
  std::vector<std::int32_t> before;  ///< the tokenizer's special tokens, which precede each window
  bool stream = false;               ///< evaluate the whole text as one sequence
  std::uint32_t prompt_tokens = 0;   ///< prompt of each sequence in tokens; 0: half of the sequence
  std::uint32_t max_tokens = 0;      ///< maximum number of tokens of each text; 0: no limit
  Queries queries = Queries::decode;
  bool compares_to_full = true;  ///< also run the full cache, for kl and same_first
  std::uint32_t draft = 0;       ///< SequenceOptions::draft
  std::uint32_t block_tokens =
      0;  ///< also reports scores for blocks of this many tokens; 0: no blocks
  unsigned threads = 1;
  std::vector<std::string> names;  ///< names of the texts, for errors; may be empty
  std::function<void(double)> progress;
  LeaveOut leave_out = nullptr;  ///< called for configurations whose budget is too small; null:
                                 ///< such a configuration is an error
};

/// Runs sequences under every configuration; returns [sequence][configuration].
using SweepRunner = std::function<std::vector<std::vector<TokenScores>>(
    const std::vector<std::vector<std::int32_t>>& sequences, std::span<const CacheConfig> configs,
    const EvalOptions& options)>;
/// Runs a sweep's sequences one after another with `run`.
std::vector<std::vector<TokenScores>> run_sequences_in_turn(
    const std::vector<std::vector<std::int32_t>>& sequences, const EvalOptions& options,
    const std::function<std::vector<TokenScores>(const std::vector<std::int32_t>& ids,
                                                 const SequenceOptions& options)>& run);
/// A runner that uses evaluate_by_layers, with one thread for each sequence.
SweepRunner layer_sweep_runner(const Model& model);
/// A runner that uses evaluate_by_tokens. `backend` must outlive it.
SweepRunner token_sweep_runner(Backend& backend);

/// Scores `configs` over texts, given as token ids without special tokens. If the full cache is
/// requested (compares_to_full) and missing, it is added as the first configuration. Throws
/// std::invalid_argument for options that do not fit the texts. If no token of a text would be
/// scored, it throws before any text is run.
Evaluation evaluate(const ModelConfig& config, const SweepRunner& run_sweep,
                    const std::vector<std::vector<std::int32_t>>& texts,
                    std::vector<CacheConfig> configs, const EvalOptions& options);

/// A warning if sequences of `tokens` tokens are longer than the model's trained context; otherwise
/// "". `option`: the option that shortens them.
std::string context_note(const ModelConfig& model, std::uint32_t tokens, std::string_view option);

}  // namespace kvlab
