// The end-to-end evaluation on the CPU, teacher-forced, layer by layer. For each layer it computes
// q, k and v of all tokens by large products, then attention under the policy with the replay's
// code, and then the hidden states for the next layer. The results are equal, bit for bit, to those
// of the CPU decoder, which works token by token.
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

/// The scores of one configuration on one sequence, for each scored token.
struct TokenScores {
  std::vector<double> nll;  ///< -ln p(next token)
  std::vector<double> kl;   ///< KL from the full cache's distribution, in nats
  std::vector<std::uint8_t>
      same_first;  ///< whether the most probable token is that of the full cache
  /// [scored token]: the probability that the prediction is accepted as a draft token, see
  /// acceptance_of(). Empty unless configurations draft.
  std::vector<double> acceptance;
  std::vector<float> seconds;  ///< time to feed the token; empty if not measured for each token
  std::uint64_t kv_bytes_peak =
      0;  ///< peak bytes of keys and values in the evaluation's dtype, over all layers and heads
};

struct SequenceOptions {
  std::uint32_t prompt_tokens = 0;    ///< length of the prompt, which is appended in each
                                      ///< configuration's prefill mode
  Queries queries = Queries::decode;  ///< the queries whose predictions are scored
  /// Number of tokens that a configuration drafts before they are verified; 0: it does not draft.
  /// Only evaluate_by_layers() supports it, and only with compares_to_first.
  std::uint32_t draft = 0;
  std::uint32_t sequence = 0;
  unsigned threads = 1;
  /// If true, the first configuration is `full`, the baseline of kl and same_first. If false, each
  /// configuration is its own baseline, and kl and same_first have no meaning.
  bool compares_to_first = true;
  std::function<void(double)> progress;  ///< called with the fraction done, 0 to 1; may be empty
};

/// Which tokens of a sequence are prompt, and which are scored. Throws std::invalid_argument if no
/// token is scored.
struct ScoredRange {
  std::uint32_t prompt, first_scored;  ///< rows first_scored to tokens - 2 are scored
};
ScoredRange scored_range(std::uint32_t tokens, const SequenceOptions& options);

/// Whether the whole prompt is one append. If so, the hidden states of its tokens are those of the
/// full cache under any policy. False if there is no prompt.
inline bool appends_prompt_at_once(const ResolvedConfig& config, const ScoredRange& range) {
  const Append& first = config.appends.front();
  return first.ends_prompt && first.tokens == range.prompt;
}

/// The segments of a sequence: a prompt, then decoded tokens.
std::vector<Segment> segments_of(std::uint32_t tokens, std::uint32_t prompt);

/// The probability that a token sampled from the logits `draft` is accepted by speculative sampling
/// from the logits `full`: Σ min(p, q), which is 1 minus the total variation distance.
double acceptance_of(std::span<const float> full, std::span<const float> draft);

/// Runs `ids` under every configuration. Computes the queries, keys and values of layer 0 only
/// once. Throws std::invalid_argument if no token is scored, or if protected tokens do not fit a
/// budget.
///
/// With SequenceOptions::draft, every configuration except the first drafts. The decoded tokens are
/// cut into windows of `draft` tokens. "Exact" means as computed with the full cache. At the start
/// of a window, the configuration's cache is the one of a replay: it contains exact keys and
/// values, and has observed exact queries. Then the tokens of the window are decoded with this
/// cache. They have the keys and values that this decoding computes, and the cache observes and
/// evicts nothing. At the end of the window these keys and values are dropped. The exact keys and
/// values of the window's tokens are appended and observed one by one instead, as in a replay. So
/// the kept sets depend only on the text.
std::vector<TokenScores> evaluate_by_layers(const Model& model, std::span<const std::int32_t> ids,
                                            std::span<const CacheConfig> configs,
                                            const SequenceOptions& options);

// The end-to-end evaluation token by token, teacher-forced, with a device's decoders. All
// configurations run at the same time as the full cache.

/// Like evaluate_by_layers(), with decoders of `backend`. The prompt is appended in each
/// configuration's prefill mode, and every other token separately. Bytes are in the device's dtype.
std::vector<TokenScores> evaluate_by_tokens(Backend& backend, std::span<const std::int32_t> ids,
                                            std::span<const CacheConfig> configs,
                                            const SequenceOptions& options);

}  // namespace kvlab
