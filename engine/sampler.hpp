// Samples the next token from logits, and scores logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvlab {
struct SamplingOptions {
  double temperature = 0;   ///< 0: greedy
  std::uint32_t top_k = 0;  ///< 0: all
  double top_p = 1.0;       ///< (0, 1]
  std::uint64_t seed = 0;
};

/// Samples deterministically: the token depends only on (seed, counter) and the logits. Greedy
/// decoding takes the lowest id of equal logits.
class Sampler {
 public:
  /// Throws std::invalid_argument for a temperature below 0 or a top_p outside (0, 1].
  explicit Sampler(SamplingOptions options);
  /// Returns the sampled id. Throws std::runtime_error if the largest logit is not finite.
  std::int32_t pick(std::span<const float> logits);
  /// Returns the probability [vocab] with which pick() returns each id, up to rounding. Throws as
  /// pick() does.
  std::vector<double> probabilities(std::span<const float> logits) const;
  /// The next random number of the seed, uniform in [0, 1). Counts as a sample.
  double uniform();

  const SamplingOptions& options() const { return options_; }
  std::uint64_t counter() const { return counter_; }  ///< samples so far
  /// Counts samples that were made elsewhere from the same (seed, counter).
  void skip(std::uint64_t samples) { counter_ += samples; }

 private:
  SamplingOptions options_;
  std::uint64_t counter_ = 0;
};

// Scores of predictions, computed on the host.

/// The score of one row of logits [vocab], which is compared with the token that followed and with
/// a baseline's row (the full cache's).
struct RowScore {
  double nll = 0;           ///< -ln p of the token that followed, in nats
  double kl = 0;            ///< KL(baseline || row), in nats
  bool same_first = false;  ///< whether the row and the baseline have the same most probable token
  std::int32_t first = 0;   ///< the most probable token; of equally probable ones, the lowest id
};
RowScore score_row(std::span<const float> baseline, std::span<const float> logits,
                   std::int32_t next);

/// Rows of logits, and what each row is scored against.
struct ScoredRows {
  const float* logits;    ///< [row, vocab], in a backend's LogitMemory
  const float* baseline;  ///< [baseline row, vocab], in a backend's LogitMemory; may be `logits`
  std::span<const std::int32_t> baseline_rows;  ///< [row]: index of the baseline's row
  std::span<const std::int32_t>
      next;  ///< [row]: the token that followed; -1: the row is not scored, and its score is zero
};

}  // namespace kvlab
