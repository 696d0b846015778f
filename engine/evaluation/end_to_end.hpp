// The end-to-end evaluation, teacher-forced and exact layer by layer: all tokens' q, k, v by large
// products, this layer's attention by the replay core under the policy, then the next layer.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/backend.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/sampler.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// What one configuration did on one sequence, by scored token.
struct EvalScores {
  std::vector<double> nll;               ///< -ln p(next token)
  std::vector<double> kl;                ///< from the full cache's distribution, nats
  std::vector<std::uint8_t> same_first;  ///< the most probable token is the full cache's
  std::vector<float> seconds;            ///< that feeding took; empty where it is not by token
  std::uint64_t kv_bytes_peak =
      0;  ///< keys and values, in the evaluation's dtype, all layers and heads
};

struct SequenceOptions {
  std::uint32_t prompt_tokens = 0;  ///< the first tokens, appended by each configuration's prefill
  Queries queries = Queries::decode;  ///< which queries' predictions are scored
  std::uint32_t sequence = 0;
  unsigned threads = 1;
  /// The first configuration is `full`, the yardstick of kl and same_first; otherwise each is its
  /// own, and they say nothing.
  bool against_first = true;
  std::function<void(double)> progress;  ///< may be empty; gets the share that is done
};

/// The tokens of a sequence as an evaluation sees them. Throws std::invalid_argument where none is
/// left to score.
struct ScoredRange {
  std::uint32_t prompt, first_scored;  ///< scored are the rows first_scored … tokens - 2
};
ScoredRange scored_range(std::uint32_t tokens, const SequenceOptions& options);

/// Whether the whole prompt is one append; never where there is none. Its rows are then those of
/// the full cache, whatever the policy.
inline bool appends_prompt_at_once(const ResolvedConfig& config, const ScoredRange& range) {
  const Append& first = config.appends.front();
  return first.ends_prompt && first.tokens == range.prompt;
}

/// A prompt, and what is decoded behind it.
std::vector<Segment> segments_of(std::uint32_t tokens, std::uint32_t prompt);

/// Runs `ids` under every configuration. Configurations share layer 0. Throws
/// std::invalid_argument: no token to score, protected tokens that do not fit.
std::vector<EvalScores> evaluate_by_layers(const Model& model, std::span<const std::int32_t> ids,
                                           std::span<const CacheConfig> configs,
                                           const SequenceOptions& options);

// The end-to-end evaluation token by token, through a device's own decoder: teacher-forced, every
// configuration beside the full cache.

/// As evaluate_by_layers(), by decoders of `backend`. The prompt is appended by each
/// configuration's prefill, every other token by itself. Bytes are those of the device's dtype.
std::vector<EvalScores> evaluate_by_tokens(Backend& backend, std::span<const std::int32_t> ids,
                                           std::span<const CacheConfig> configs,
                                           const SequenceOptions& options);

}  // namespace kvlab
