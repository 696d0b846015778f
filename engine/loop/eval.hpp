// `kvlab eval`: perplexity and company of a grid of configurations over texts, in the closed loop.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/loop/eval/score.hpp"

namespace kvlab {

struct EvalOptions {
  std::uint32_t window = 0;          ///< tokens, the first one included; 0: the trained context
  std::vector<std::int32_t> before;  ///< the tokenizer's, put before each window
  bool stream = false;               ///< the whole text as one sequence
  std::uint32_t prompt_tokens = 0;   ///< of each sequence; 0: half of it
  std::uint32_t max_tokens = 0;      ///< of each text; 0: all
  Span span = Span::decode;
  bool against_full = true;        ///< run the full cache too, for kl and same_first
  std::uint32_t block_tokens = 0;  ///< scores by so many tokens, too; 0: not
  unsigned threads = 1;
  std::vector<std::string> names;  ///< of the texts, for errors; or none
  std::function<void(double)> progress;
  LeaveOut leave_out = nullptr;  ///< gets what has too small a budget; null: that is refused
};

/// A sweep runs sequences under every configuration: [sequence][configuration].
using Sweep = std::function<std::vector<std::vector<LoopScores>>(
    const std::vector<std::vector<std::int32_t>>& sequences, std::span<const CacheConfig> configs,
    const EvalOptions& options)>;
/// A sweep's sequences one after the other, each by `run`.
std::vector<std::vector<LoopScores>> sweep_in_turn(
    const std::vector<std::vector<std::int32_t>>& sequences, const EvalOptions& options,
    const std::function<std::vector<LoopScores>(const std::vector<std::int32_t>& ids,
                                                const LoopOptions& options)>& run);
/// A sweep by run_closed_loop, a thread for each sequence.
Sweep sweep_by_layers(const Model& model);
/// Sweeps by run_decoder_loop; `backend` must outlive them.
Sweep sweep_by_tokens(Backend& backend);

/// Scores `configs` (`full` is put in front if it is not there, and asked for) over texts given as
/// token ids without special tokens. Throws std::invalid_argument, for a text of which nothing
/// would be scored before any is run.
Evaluation evaluate(const ModelConfig& config, const Sweep& sweep,
                    const std::vector<std::vector<std::int32_t>>& texts,
                    std::vector<CacheConfig> configs, const EvalOptions& options);

}  // namespace kvlab
