// The interface of caches in device memory and of attention over them: the full cache, and a cache
// that evicts. Everything is enqueued on the decoder's stream.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/capture_shape.hpp"
#include "kernels/cache/kv_cache.hpp"

namespace kvlab {

using PromptChunk = kernels::AppendChunk;

/// Appends many tokens to the cache of one sequence: for each layer in order, and for each part of
/// the append, first write(), then attend(). Any other order throws std::logic_error.
class DeviceAppend {
 public:
  DeviceAppend(std::uint32_t layers, std::uint32_t tokens) : layers_(layers), tokens_(tokens) {}
  virtual ~DeviceAppend() = default;

  /// Returns where to write the part's q, k and v, and how to rotate them. The caller sets the
  /// other arguments (qkv, norms, capture).
  kernels::RopeWriteArgs write(std::uint32_t layer, const PromptChunk& part);
  /// Enqueues the attention for that write. After the attention of the append's last part, the
  /// layer's cache contains all its tokens.
  void attend(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& to);
  /// Ends the append after the last layer.
  void finish() const;

 protected:
  std::uint32_t tokens() const { return tokens_; }

 private:
  virtual kernels::RopeWriteArgs write_part(std::uint32_t layer, const PromptChunk& part) = 0;
  virtual void attend_part(std::uint32_t layer, const PromptChunk& part,
                           const LayerOutputs& to) = 0;
  void expect(std::uint32_t layer, std::uint32_t first, bool written) const;

  std::uint32_t layers_, tokens_;
  std::uint32_t layer_ = 0, next_ = 0;  // next_: index of the next token
  bool written_ = false;
};

/// The cache's part of a decode step with one token for each sequence. Its launches have the same
/// arguments in every step, so that a CUDA graph can contain them. Call begin(); then write(),
/// attend() and observe() for each layer; then end().
class CacheStep {
 public:
  virtual ~CacheStep() = default;
  virtual void begin() const {}
  /// See DeviceAppend::write().
  virtual kernels::RopeWriteArgs write(std::uint32_t layer) const = 0;
  virtual void attend(std::uint32_t layer) const = 0;
  /// Starts the observation of a layer. Only end() waits for it, so it may run at the same time as
  /// the next launches. Call it after the first launch that follows attention, because that launch
  /// is the most urgent one.
  virtual void observe(std::uint32_t /*layer*/) const {}
  /// Makes the stream wait for all observations, because the next step changes their inputs.
  virtual void end() const {}
};

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;

  /// The state of a row that was fed `fed` tokens. If `fed` is 0, the row is idle.
  virtual BatchState::Row row(std::uint32_t fed) const = 0;
  /// Number of a prompt's tokens to append at a time; 0: all.
  virtual std::uint32_t prefill_chunk(int sequence) const = 0;

  /// Begins an append of `tokens` tokens to a sequence that has `fed` tokens. Only one append may
  /// be active at a time, and it must not outlive the cache. `ends_prompt`: the append is the last
  /// one of a prompt segment.
  virtual std::unique_ptr<DeviceAppend> append(int sequence, std::uint32_t fed,
                                               std::uint32_t tokens, bool ends_prompt) = 0;
  /// Does the host's work before a step that feeds one token to a sequence that has `fed` tokens.
  virtual void before_token(int /*sequence*/, std::uint32_t /*fed*/) {}
  /// Call when a prompt segment has ended after `fed` tokens.
  virtual void end_prompt(int /*sequence*/, std::uint32_t /*fed*/) {}
  /// Makes a decode step for the first `rows` sequences. It writes attention outputs to `outputs`,
  /// and must not outlive `outputs` or the cache.
  virtual std::unique_ptr<const CacheStep> step(int rows,
                                                const LayerOutputMemory& outputs) const = 0;

  /// Bytes of the live keys and values of a sequence that was fed `fed` tokens.
  virtual std::uint64_t live_bytes(int sequence, std::uint32_t fed) const = 0;
  /// Number of live tokens after `fed` tokens, [layer][KV head]; empty if nothing is evicted.
  virtual std::vector<std::vector<std::uint32_t>> kept(int, std::uint32_t) const { return {}; }
  /// Number of evicted tokens over all layers and KV heads. `before`: number of tokens that the
  /// sequence had before the last append.
  virtual std::uint64_t evictions(int /*sequence*/, std::uint32_t /*before*/) const { return 0; }
  /// For benchmarks: fills all sequences with random keys and values instead of prompts of `tokens`
  /// tokens.
  virtual void pretend(std::uint32_t tokens) = 0;
};

/// Bytes of device memory: for tokens and their state, and for work buffers.
struct CacheBytes {
  std::uint64_t storage, work;
};

}  // namespace kvlab
