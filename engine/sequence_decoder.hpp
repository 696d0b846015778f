// The interface of decoders of one sequence, on the CPU and on CUDA devices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "engine/sampler.hpp"
#include "traces/trace.hpp"

namespace kvlab {

// Maximum length of a sequence, so that no counter overflows.

/// `group`: number of query heads that share a KV head. In each decode step, a token's request
/// count (32 bits) grows by at most `group`, and its mass (64 bits, in units of 2^-32) by at most
/// `group` * 2^32. Positions have 31 bits.
constexpr std::uint32_t longest_sequence(std::uint32_t group) {
  return std::min((1u << 31) - 1, std::numeric_limits<std::uint32_t>::max() / group);
}

class SequenceDecoder {
 public:
  virtual ~SequenceDecoder() = default;

  /// Feeds tokens. Returns the logits [vocab] of the last token, valid until the next call. If
  /// `all_logits` is not null, also writes the logits of every token [n, vocab] there. Throws
  /// std::invalid_argument if there are no tokens, and std::out_of_range for an id outside the
  /// vocabulary.
  virtual std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                                      std::vector<float>* all_logits = nullptr) = 0;
  /// Samples a token from the last logits, feeds it, samples the next one, and so on, until `count`
  /// tokens have been sampled or `on_id` returns false. The last sampled token is not fed. Throws
  /// std::invalid_argument if nothing was fed before.
  virtual void extend(Sampler& sampler, std::uint32_t count,
                      const std::function<bool(std::int32_t id)>& on_id) = 0;
  /// Waits until the observer has received everything. Rethrows errors that the observer has
  /// thrown.
  virtual void flush() {}

  virtual std::uint32_t tokens() const = 0;  ///< fed so far
  virtual std::uint64_t kv_bytes_peak()
      const = 0;  ///< peak bytes of keys and values, over all layers and heads
  virtual std::uint64_t evictions() const = 0;  ///< evicted tokens, over the layers that policies
                                                ///< act on
  /// Number of live tokens [layer][KV head]; empty if the decoder does not count them by head.
  virtual std::vector<std::vector<std::uint32_t>> kept() const { return {}; }
};

}  // namespace kvlab
