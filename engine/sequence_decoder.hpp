// What every decoder of one sequence does, on the CPU or on a CUDA device.
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

// How many tokens a sequence may have before something that counts them is full.

/// In tokens. Each step gives a token at most `group` probabilities of 1 (2^32 units of a 64-bit
/// sum) and `group` requests (of a 32-bit count); positions have 31 bits.
constexpr std::uint32_t longest_sequence(std::uint32_t group) {
  return std::min((1u << 31) - 1, std::numeric_limits<std::uint32_t>::max() / group);
}

class SequenceDecoder {
 public:
  virtual ~SequenceDecoder() = default;

  /// Feeds tokens. Returns the logits [vocab] of the last one, valid until the next call.
  /// `all_logits`: where to put those of every token [n, vocab]. Throws std::invalid_argument for
  /// no tokens, std::out_of_range for an id outside the vocabulary.
  virtual std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                                      std::vector<float>* all_logits = nullptr) = 0;
  /// Samples a token from the last logits, feeds it, samples the next, and so on, until `count`
  /// were sampled or `on_id` says false. The last one sampled is not fed. Throws
  /// std::invalid_argument if nothing was fed yet.
  virtual void extend(Sampler& sampler, std::uint32_t count,
                      const std::function<bool(std::int32_t id)>& on_id) = 0;
  /// Waits until all that was computed is with the observer; throws what went wrong there.
  virtual void flush() {}

  virtual std::uint32_t tokens() const = 0;  ///< fed so far
  virtual std::uint64_t kv_bytes_peak()
      const = 0;  ///< keys and values held at most, all layers and heads
  virtual std::uint64_t evictions() const = 0;  ///< in layers that policies act on
  /// Tokens live now, [layer][KV head]; empty where they are not counted by head.
  virtual std::vector<std::vector<std::uint32_t>> kept() const { return {}; }
};

}  // namespace kvlab
