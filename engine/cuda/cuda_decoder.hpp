// The decoder on the device: batches of sequences of unequal length, the whole cache of each or
// what a policy keeps of it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/cuda/cache/cache_watch.hpp"
#include "engine/cuda/decode_step.hpp"
#include "engine/cuda/host_copies.hpp"
#include "engine/decoder.hpp"

namespace kvlab {

/// The decoder's own work buffers.
struct DecoderWork {
  DecoderWork() = default;
  DecoderWork(cuda::Arena& arena, const ModelConfig& config, int rows, int sequences);
  float* x = nullptr;       // [row, hidden]
  float* logits = nullptr;  // [sequence, vocab]
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
  /// leave, a prompt is appended as its cache says, decoded tokens one by one. `all_logits`: waits,
  /// and puts those of every token there [n, vocab]. Throws std::out_of_range for an id outside the
  /// vocabulary.
  void prefill(int sequence, std::span<const std::int32_t> ids,
               std::vector<float>* all_logits = nullptr, const OnChunk& on_chunk = {},
               SegmentKind kind = SegmentKind::prompt);
  /// Feeds each of the first `rows` sequences its next token, computes its logits and samples the
  /// token after. Sequences that were given nothing yet are idle.
  void step(int rows) { run_graph(rows, Next::sampled); }
  /// A step enqueued launch by launch instead of as a graph. Tests hold the graph against it.
  void step_plain(int rows);
  /// Samples the next token of each of the first `rows` sequences from its logits.
  void choose(int rows);
  /// Feeds as step() does, but leaves the next tokens as they are. For tests.
  void feed_next(int rows) { run_graph(rows, Next::given); }

  /// Feeds the first `rows` sequences ids [step, row], whatever was sampled. `logits`: device
  /// memory where those of every step and row go [step, row, vocab], or null. Throws as prefill()
  /// does.
  void force(int rows, std::span<const std::int32_t> ids, float* logits);

  /// Shows what a sequence's cache does; null: there is no observer. Throws std::logic_error if the
  /// decoder was not made to be watched.
  void watch(int sequence, DecoderObserver* observer);

  void set_sampling(int sequence, const SamplingOptions& options, std::uint64_t counter = 0) {
    batch_.set_sampling(sequence, options, counter);
  }
  /// The token that the next step feeds.
  void set_next(int sequence, std::int32_t id);
  /// Whether tokens are evicted: then nothing that was fed can be forgotten.
  bool evicts() const { return options_.evicts(); }
  /// Whether tokens can be forgotten: where none leaves, and no layer's window has been left
  /// behind.
  bool can_forget() const;
  /// Forgets all but the first `tokens`. Throws std::logic_error where it cannot; all can be
  /// forgotten where none leaves.
  void rewind(int sequence, std::uint32_t tokens);
  /// Benchmarks: random keys and values instead of a prompt of so many tokens.
  void pretend(int sequence, std::uint32_t tokens);

  /// How many times choose() or step() has sampled.
  std::uint64_t published() const { return batch_.published(); }
  /// Waits for the ids that the index-th of them sampled, [rows]; the last kRing can be requested.
  std::span<const std::int32_t> ids(std::uint64_t index) const { return batch_.ids(index); }
  static constexpr int kRing = BatchState::kRing;
  /// Waits; the logits of a sequence's last token [vocab].
  std::vector<float> logits(int sequence) const;
  /// Enqueues a copy of them to device memory.
  void copy_logits(int sequence, float* to) const;
  std::uint32_t tokens(int sequence) const {  ///< fed so far
    return fed_.at(static_cast<std::size_t>(sequence));
  }

  const DeviceModel& model() const { return model_; }
  std::vector<std::vector<std::uint32_t>> kept(int sequence) const {
    return cache_->kept(sequence, tokens(sequence));
  }
  std::uint64_t live_bytes(int sequence) const {  ///< keys and values that it holds
    return cache_->live_bytes(sequence, tokens(sequence));
  }
  std::uint64_t evictions(int sequence) const {  ///< over all layers and KV heads
    return cache_->evictions(sequence, appended_behind_.at(static_cast<std::size_t>(sequence)));
  }
  cudaStream_t stream() const { return stream_.get(); }
  void synchronize() const { stream_.synchronize("decoding"); }

  /// Of the last step's token: all layers, CaptureShape of one token.
  const std::byte* step_capture() const { return outputs_.step_data(); }

  /// A step of the first `rows`, for benchmarks; must not outlive the decoder.
  DecodeStep decode_step(int rows) { return decode_step(rows, Next::sampled); }

 private:
  using Next = DecodeStep::Next;
  struct Piece;

  /// The options, so that it can be asked before anything is allocated. Throws
  /// std::invalid_argument for options that make no sense, std::runtime_error that says what is
  /// needed and what would fit.
  static CudaDecoderOptions checked(const DeviceModel& model, const CudaDecoderOptions& options);
  void make_cache();
  DecodeStep decode_step(int rows, Next next);
  void set_row(int row) { batch_.set_row(row, cache_->row(tokens(row))); }
  void check_ids(std::span<const std::int32_t> ids) const;
  void check_rows(int rows) const;
  void check_capacity(std::uint64_t tokens) const;

  void append(const Piece& piece, float* logits, const OnChunk& on_chunk);
  void feed_alone(const Piece& piece, float* logits);
  std::size_t tokens_at_once(int sequence, SegmentKind kind, std::size_t count) const;
  float* append_states(std::size_t count);
  void copy_logits(const float* x, std::size_t count, float* to);
  void keep_logits(std::size_t rows);
  void restore_logits(std::size_t rows);

  void before_step(int rows);
  void after_step(int rows, Next next);
  void run_graph(int rows, Next next);
  const cuda::Graph& graph(int rows, Next next);
  std::vector<CacheWatch::Fed> watched_rows(int rows) const;
  void note_fed(int row);

  float* logits_row(int row) const {
    return work_->logits + static_cast<std::size_t>(row) * config_.vocab;
  }

  const DeviceModel& model_;
  const ModelConfig& config_;
  CudaDecoderOptions options_;
  cuda::Stream stream_;
  BatchState batch_;
  LayerOutputMemory outputs_;
  std::unique_ptr<DeviceCache> cache_;
  std::unique_ptr<CacheWatch> watch_;  // or null
  DeviceLayers layers_;
  PromptIds prompt_;
  LogitRing logit_ring_;
  // [sequence]: tokens, and how many of them were there before the last append.
  std::vector<std::uint32_t> fed_, appended_behind_;
  cuda::Placed<DecoderWork> work_;
  cuda::Placed<DecoderWork> append_;  // hidden states of an append that is longer
  cuda::DeviceBuffer kept_logits_;    // of other sequences, while one is fed
  cuda::DeviceBuffer logit_rows_;     // [kLogitRows, vocab], made when requested
  std::map<std::pair<int, Next>, cuda::Graph> graphs_;
};

}  // namespace kvlab
