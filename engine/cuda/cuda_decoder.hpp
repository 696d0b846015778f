// The decoder on the device: batches of sequences of unequal length, the whole cache of each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/capture_shape.hpp"
#include "engine/cuda/device_model.hpp"
#include "engine/sampler.hpp"

namespace kvlab {

struct CudaDecoderOptions {
  int sequences = 1;
  std::uint32_t slots = 0;              ///< tokens that each sequence may hold
  std::uint32_t prefill_tokens = 2048;  ///< of a prompt at once
  bool capture = false;  ///< keep q, k, v before RoPE, out and lse; one sequence only
};

/// Everything is enqueued on one stream and returns at once, unless it says that it waits. Throws
/// std::runtime_error where the device fails, std::invalid_argument for tokens beyond the slots.
class CudaDecoder {
 public:
  /// `model` must outlive the decoder. Throws std::runtime_error if the cache and the work buffers
  /// do not fit the device's memory, and says how many tokens would.
  CudaDecoder(const DeviceModel& model, CudaDecoderOptions options);
  ~CudaDecoder();

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

  /// Feeds tokens to one sequence, and leaves the last one's logits in its row. `all_logits`:
  /// waits, and puts those of every token there [n, vocab]. Throws std::out_of_range for an id
  /// outside the vocabulary.
  void prefill(int sequence, std::span<const std::int32_t> ids,
               std::vector<float>* all_logits = nullptr, const OnChunk& on_chunk = {});
  /// Feeds each of the first `rows` sequences its next token, computes its logits and samples the
  /// token after. Sequences that were given nothing yet are idle.
  void step(int rows);
  /// The same, enqueued launch by launch instead of as a graph.
  void step_plain(int rows);
  /// Samples the next token of each of the first `rows` sequences from its logits.
  void choose(int rows);
  /// Feeds as step() does, but leaves the next tokens as they are.
  void feed_next(int rows);

  void set_sampling(int sequence, const SamplingOptions& options, std::uint64_t counter = 0);
  /// The token that the next step feeds.
  void set_next(int sequence, std::int32_t id);
  /// Forgets all but the first `tokens`.
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
  std::uint64_t cache_bytes(std::uint64_t tokens) const;  ///< of one sequence's keys and values
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
