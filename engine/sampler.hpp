// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>

namespace kvlab {
struct SamplingOptions {
  double temperature = 0;   ///< 0: greedy
  std::uint32_t top_k = 0;  ///< 0: all
  double top_p = 1.0;       ///< (0, 1]
  std::uint64_t seed = 0;
};

/// Deterministic: the sample depends on (seed, counter) alone. Greedy ties: the lowest id.
class Sampler {
 public:
  /// Throws std::invalid_argument for a temperature below 0 or a top_p outside (0, 1].
  explicit Sampler(SamplingOptions options);
  /// Throws std::runtime_error where the largest logit is not finite.
  std::int32_t pick(std::span<const float> logits);

  const SamplingOptions& options() const { return options_; }
  std::uint64_t counter() const { return counter_; }  ///< samples so far
  /// Samples that were made elsewhere, from (seed, counter) too.
  void skip(std::uint64_t samples) { counter_ += samples; }

 private:
  SamplingOptions options_;
  std::uint64_t counter_ = 0;
};

// How logits foretell: the score of a row beside another's, on the host.

/// One row of logits [vocab] scored against the token that followed and a yardstick's row, the full
/// cache's.
struct RowScore {
  double nll = 0;           ///< -ln of what the row gives the token that followed
  double kl = 0;            ///< of the yardstick's distribution from the row's, in nats
  bool same_first = false;  ///< the likeliest token is the yardstick's
  std::int32_t first = 0;   ///< the likeliest token; the lowest id of several
};
RowScore score_row(std::span<const float> yardstick, std::span<const float> logits,
                   std::int32_t next);

/// Rows of logits, and what each is scored against.
struct ScoredRows {
  const float* logits;                           ///< [row, vocab], in a backend's LogitMemory
  const float* yardstick;                        ///< [its row, vocab], likewise; may be `logits`
  std::span<const std::int32_t> yardstick_rows;  ///< [row]: which of the yardstick's
  std::span<const std::int32_t> next;            ///< [row]: what followed; -1: not scored, zeros
};

}  // namespace kvlab
