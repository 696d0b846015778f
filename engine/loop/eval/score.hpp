// What an evaluation finds: one configuration's figures, and how far apart two of them are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/loop/closed_loop.hpp"
#include "engine/loop/statistics.hpp"

namespace kvlab {

/// The scored tokens of each sequence from `first` on, so many as a block has.
struct EvalBlock {
  std::uint64_t first;
  double nll;                     ///< mean nats per token
  double milliseconds_per_token;  ///< NaN on the CPU, which works layer by layer
};

/// The scored tokens of one text.
struct EvalText {
  double nll, kl;        ///< mean nats
  std::uint64_t tokens;  ///< scored
};

/// One configuration's figures over all scored tokens.
struct EvalScore {
  CacheConfig config;
  std::uint32_t budget_tokens;
  double nll, nll_error;                ///< mean nats per token, standard error
  double perplexity, perplexity_error;  ///< exp(nll), by the delta method
  double kl, kl_error;                  ///< mean nats, to the full cache; NaN without it
  double kl_p50, kl_p90, kl_p99;        ///< percentiles over the tokens
  double same_first;                    ///< share of tokens; NaN without the full cache
  std::uint64_t tokens;                 ///< scored
  std::uint64_t kv_bytes_peak;          ///< of one sequence
  std::vector<EvalText> texts;
  double nll_deviation, kl_deviation;  ///< standard deviation of the texts' means; NaN of one text
  std::vector<EvalBlock> blocks;       ///< where they were asked for

  /// The policy, and the budget where heads differ in it; `whole`: with its defaults.
  std::string label(bool whole = false) const;
};

/// Two configurations over the same tokens: `a` less `b`, nats.
struct EvalPair {
  std::size_t a, b;  ///< indices into the scores
  Difference kl;     ///< NaN without the full cache
  Difference nll;
};

struct Evaluation {
  std::vector<EvalScore> scores;
  /// Every configuration with the first one, and every two of one budget in tokens (the mean where
  /// heads differ).
  std::vector<EvalPair> pairs;

  /// Those that evict at as many tokens as a budget (as asked), the best first by KL, or by nll
  /// without the full cache; and whether the best is ahead of each.
  struct Contender {
    std::size_t score;
    Difference behind;  ///< its figure less the best's; 0 of the best itself
  };
  std::vector<Contender> contenders(const std::string& budget) const;
  /// Budgets that configurations which evict were asked for, by tokens; of those of as many the
  /// first.
  std::vector<std::string> budgets() const;
};

/// Scores [sequence][configuration], and which text each sequence is of.
struct ScoredSequences {
  std::vector<std::vector<LoopScores>> scores;
  std::vector<std::size_t> text;
};

/// Figures of the `c`-th configuration. Standard errors take sequences as blocks, or sixteenths of
/// them where there are fewer than eight. `block_tokens`: scores by so many tokens, too; 0: not.
/// Throws std::runtime_error where a log-likelihood is not finite.
EvalScore score_of(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                   const ScoredSequences& sequences, bool against_full, std::size_t block_tokens);

/// The pairs of an evaluation, by the block bootstrap.
std::vector<EvalPair> pairs_of(std::span<const EvalScore> scores, const ScoredSequences& sequences,
                               bool against_full);

}  // namespace kvlab
