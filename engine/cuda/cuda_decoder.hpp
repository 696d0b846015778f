// The decoder on the device: batches of sequences of unequal length, the whole cache of each or
// what a policy keeps of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/capture_shape.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "engine/decoder.hpp"

namespace kvlab {

struct CudaDecoderOptions {
  int sequences = 1;
  std::uint32_t slots = 0;  ///< tokens of each sequence; 0: no limit, where each has a budget
  std::uint32_t prefill_tokens = 2048;  ///< of a prompt at once
  bool capture = false;  ///< keep q, k, v before RoPE, out and lse; one sequence only
  /// [sequence], of one policy and one kind of positions; empty: the whole cache of each.
  std::vector<CacheOptions> caches;
  /// Of the longest prompt, where it is known, so that fits() counts it; 0: its memory is taken
  /// when it comes.
  std::uint32_t longest_prompt = 0;
  bool watched = false;         ///< observers may look at what the caches do: slow
  bool plain_eviction = false;  ///< by kernels/evict/plain_eviction.hpp: slow, but on any device
};

/// Everything is enqueued on one stream and returns at once, unless it says that it waits. Throws
/// std::runtime_error where the device fails, std::invalid_argument for tokens beyond the slots.
class CudaDecoder {
 public:
  /// `model` must outlive the decoder. Throws std::runtime_error if the cache and the work buffers
  /// do not fit the device's memory, and says how many tokens would.
  CudaDecoder(const DeviceModel& model, CudaDecoderOptions options);
  ~CudaDecoder();
  /// Whether a decoder with these options would fit the memory that is free now.
  static bool fits(const DeviceModel& model, const CudaDecoderOptions& options);

  /// Called with every layer of a prompt's chunk when it has been enqueued: the layer, the chunk's
  /// tokens, and what is there in device memory (CaptureShape). The memory is used again two layers
  /// later, behind what the watcher has enqueued on the stream or recorded into `free`.
  struct Chunk {
    std::span<const std::int32_t> ids;
    bool first, last;  ///< layer of the chunk
    bool opens;        ///< the prompt's first chunk
    std::uint32_t layer;
    const std::byte* data;
  };
  using OnChunk = std::function<void(const Chunk&)>;

  /// Feeds tokens to one sequence, and leaves the last one's logits in its row. Where tokens may
  /// leave, a prompt is admitted as its cache says, decoded tokens one by one. `all_logits`: waits,
  /// and puts those of every token there [n, vocab]. Throws std::out_of_range for an id outside the
  /// vocabulary.
  void prefill(int sequence, std::span<const std::int32_t> ids,
               std::vector<float>* all_logits = nullptr, const OnChunk& on_chunk = {},
               SegmentKind kind = SegmentKind::prompt);
  /// Feeds each of the first `rows` sequences its next token, computes its logits and samples the
  /// token after. Sequences that were given nothing yet are idle.
  void step(int rows);
  /// The same, enqueued launch by launch instead of as a graph.
  void step_plain(int rows);
  /// Samples the next token of each of the first `rows` sequences from its logits.
  void choose(int rows);
  /// Feeds as step() does, but leaves the next tokens as they are.
  void feed_next(int rows);

  /// Feeds the first `rows` sequences ids [step, row], whatever was sampled. `logits`: device
  /// memory where those of every step and row go [step, row, vocab], or null. Throws as prefill()
  /// does.
  void force(int rows, std::span<const std::int32_t> ids, float* logits);

  /// Shows what a sequence's cache does; null: nobody looks. Throws std::logic_error if the decoder
  /// was not made to be watched.
  void watch(int sequence, DecoderObserver* observer);

  void set_sampling(int sequence, const SamplingOptions& options, std::uint64_t counter = 0);
  /// The token that the next step feeds.
  void set_next(int sequence, std::int32_t id);
  /// Whether tokens leave: then nothing that was fed can be forgotten.
  bool evicts() const;
  /// Forgets all but the first `tokens`. Throws std::logic_error where tokens leave.
  void rewind(int sequence, std::uint32_t tokens);
  /// Benchmarks: random keys and values instead of a prompt of so many tokens.
  void pretend(int sequence, std::uint32_t tokens);

  /// How many times choose() or step() has sampled.
  std::uint64_t published() const;
  /// Waits for the ids that the index-th of them sampled, [rows]; the last kRing can be asked for.
  std::span<const std::int32_t> ids(std::uint64_t index) const;
  static constexpr int kRing = BatchState::kRing;
  /// Waits; the logits of a sequence's last token [vocab].
  std::vector<float> logits(int sequence) const;
  std::uint32_t tokens(int sequence) const;  ///< fed so far

  const DeviceModel& model() const;
  /// Keys and values of so many live tokens of one sequence, in all layers and heads.
  std::uint64_t cache_bytes(std::uint64_t tokens) const;
  std::uint64_t live_bytes(int sequence) const;  ///< keys and values that it holds
  std::uint64_t evictions(int sequence) const;   ///< over all layers and KV heads
  cudaStream_t stream() const;
  void synchronize() const;

  CaptureShape capture_shape() const;
  /// Of the last step's token: all layers, CaptureShape of one token.
  const std::byte* step_capture() const;

  /// One kind of launch of a step, over all layers: for benchmarks.
  struct Part {
    std::string name;
    std::uint64_t bytes;  ///< that it has to move
    std::function<void()> enqueue;
  };
  std::vector<Part> parts(int rows);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvlab
