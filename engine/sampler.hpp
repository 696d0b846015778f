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

/// Deterministic: the draw depends on (seed, counter) alone. Greedy ties: the lowest id.
class Sampler {
 public:
  /// Throws std::invalid_argument for a temperature below 0 or a top_p outside (0, 1].
  explicit Sampler(SamplingOptions options);
  /// Throws std::runtime_error where the largest logit is not finite.
  std::int32_t pick(std::span<const float> logits);

  const SamplingOptions& options() const { return options_; }
  std::uint64_t counter() const { return counter_; }  ///< draws so far
  /// Draws that were made elsewhere, from (seed, counter) too.
  void skip(std::uint64_t draws) { counter_ += draws; }

 private:
  SamplingOptions options_;
  std::uint64_t counter_ = 0;
};

}  // namespace kvlab
