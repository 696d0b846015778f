// Where keys and values live, and attention over them: what the whole cache and one that evicts
// have in common. Everything is enqueued on the decoder's stream.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/capture_shape.hpp"
#include "kernels/cache/slot_caches.hpp"

namespace kvlab {

using PromptChunk = kernels::AppendChunk;

/// Many tokens on their way into the cache of one sequence: through each layer in order, in parts;
/// of each part first write(), then attend(). Throws std::logic_error for any other order.
class DeviceAppend {
 public:
  DeviceAppend(std::uint32_t layers, std::uint32_t tokens) : layers_(layers), tokens_(tokens) {}
  virtual ~DeviceAppend() = default;

  /// Where the part's q, k and v are written, and how they are rotated; the rest of the arguments
  /// (qkv, norms, capture) is the caller's.
  kernels::RopeWriteArgs write(std::uint32_t layer, const PromptChunk& part);
  /// Behind that write. With the layer's last part the layer's cache has appended the tokens.
  void attend(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& to);
  /// Behind the last layer.
  void finish() const;

 protected:
  std::uint32_t tokens() const { return tokens_; }

 private:
  virtual kernels::RopeWriteArgs write_part(std::uint32_t layer, const PromptChunk& part) = 0;
  virtual void attend_part(std::uint32_t layer, const PromptChunk& part,
                           const LayerOutputs& to) = 0;
  void expect(std::uint32_t layer, std::uint32_t first, bool written) const;

  std::uint32_t layers_, tokens_;
  std::uint32_t layer_ = 0, next_ = 0;  // the token that comes next
  bool written_ = false;
};

/// The cache's share of a decode step, one token for each of so many sequences. Nothing of it
/// changes from launch to launch, so that a graph can hold what it enqueues: begin(); of each layer
/// write(), attend(), observe(); end().
class CacheStep {
 public:
  virtual ~CacheStep() = default;
  virtual void begin() const {}
  /// As DeviceAppend::write().
  virtual kernels::RopeWriteArgs write(std::uint32_t layer) const = 0;
  virtual void attend(std::uint32_t layer) const = 0;
  /// What nothing waits for before the end, beside the launches that follow: so behind the first
  /// that most needs to come soon.
  virtual void observe(std::uint32_t /*layer*/) const {}
  /// Waits for all that, before anything that the next step changes.
  virtual void end() const {}
};

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;

  /// What a row that has been fed so many tokens carries from step to step; 0: it is idle.
  virtual BatchState::Row row(std::uint32_t fed) const = 0;
  /// A prompt is appended so many tokens at a time; 0: as many as it has.
  virtual std::uint32_t prefill_chunk(int sequence) const = 0;

  /// Begins to append `tokens` behind those fed. One append at a time; it must not outlive the
  /// cache.
  /// `ends_prompt`: a prompt segment ends with it.
  virtual std::unique_ptr<DeviceAppend> append(int sequence, std::uint32_t fed,
                                               std::uint32_t tokens, bool ends_prompt) = 0;
  /// Before a step that feeds one token to the sequence behind `fed`.
  virtual void before_token(int /*sequence*/, std::uint32_t /*fed*/) {}
  /// A prompt segment has ended with the last of `fed` tokens.
  virtual void end_prompt(int /*sequence*/, std::uint32_t /*fed*/) {}
  /// A step of the first `rows` sequences; attention puts out to `outputs`. Neither may outlive the
  /// cache.
  virtual std::unique_ptr<const CacheStep> step(int rows,
                                                const LayerOutputMemory& outputs) const = 0;

  /// Keys and values of a sequence that has been fed so many tokens.
  virtual std::uint64_t live_bytes(int sequence, std::uint32_t fed) const = 0;
  /// Tokens live after `fed`, [layer][KV head]; empty where nothing is evicted.
  virtual std::vector<std::vector<std::uint32_t>> kept(int, std::uint32_t) const { return {}; }
  /// How many were evicted, all layers and KV heads, when the last append came behind so
  /// many tokens.
  virtual std::uint64_t evictions(int /*sequence*/, std::uint32_t /*behind*/) const { return 0; }
  /// Benchmarks: random keys and values instead of a prompt of so many tokens.
  virtual void pretend(int sequence, std::uint32_t tokens) = 0;
};

/// Device memory, in bytes: of tokens and what is kept of each, and of work.
struct CacheBytes {
  std::uint64_t storage, work;
};

}  // namespace kvlab
