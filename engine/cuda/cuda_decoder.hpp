// The CUDA decoder. It decodes batches of sequences of different lengths, with the full cache or
// with a policy.
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

/// Work buffers of the decoder.
struct DecoderWork {
  DecoderWork() = default;
  DecoderWork(cuda::Arena& arena, const ModelConfig& config, int rows, int sequences);
  float* x = nullptr;       // [row, hidden]
  float* logits = nullptr;  // [sequence, vocab]
};

/// All functions enqueue on one stream and return immediately, unless their comment says that they
/// wait. They throw std::runtime_error if the device fails, and std::invalid_argument for more
/// tokens than a sequence has slots.
class CudaDecoder {
 public:
  /// `model` must outlive the decoder. Throws std::runtime_error if the cache and the work buffers
  /// do not fit the device's memory; the message says how many tokens would fit.
  CudaDecoder(const DeviceModel& model, CudaDecoderOptions options);
  ~CudaDecoder();
  /// Whether a decoder with these options fits the memory that is free now.
  static bool fits(const DeviceModel& model, const CudaDecoderOptions& options);

  /// The argument of OnChunk, which is called for every layer of a prompt's chunk after the layer
  /// was enqueued. `data`: the layer's outputs in device memory (CaptureShape). This memory is
  /// overwritten two calls later, after the work that the callback has enqueued on the stream.
  struct Chunk {
    std::span<const std::int32_t> ids;
    bool first, last;  ///< whether it is the chunk's first or last layer
    bool opens;        ///< whether it is the prompt's first chunk
    std::uint32_t layer;
    const std::byte* data;
  };
  using OnChunk = std::function<void(const Chunk&)>;

  /// Feeds tokens to one sequence, and keeps the last token's logits. If the cache evicts, a prompt
  /// is appended in its configuration's prefill mode, and decoded tokens are appended one by one.
  /// If `all_logits` is not null, writes the logits of every token [n, vocab] there and waits.
  /// Throws std::out_of_range for an id outside the vocabulary.
  void prefill(int sequence, std::span<const std::int32_t> ids,
               std::vector<float>* all_logits = nullptr, const OnChunk& on_chunk = {},
               SegmentKind kind = SegmentKind::prompt);
  /// Feeds each of the first `rows` sequences its next token, computes the logits, and samples the
  /// token after it. Sequences that have not been fed anything are idle.
  void step(int rows) { run_graph(rows, Next::sampled); }
  /// Like step(), but enqueues each launch instead of a graph. Tests compare the graph with it.
  void step_plain(int rows);
  /// Samples the next token of each of the first `rows` sequences from its logits.
  void choose(int rows);
  /// Like step(), but does not sample the token after it. For tests.
  void feed_next(int rows) { run_graph(rows, Next::given); }

  /// Feeds ids [step, row] to the first `rows` sequences, instead of the sampled ids. `logits`:
  /// device memory for the logits of every step and row [step, row, vocab]; may be null. Throws as
  /// prefill() does.
  void force(int rows, std::span<const std::int32_t> ids, float* logits);

  /// Reports to `observer` what a sequence's cache does; null: no observer. Throws std::logic_error
  /// if the decoder was not made with `watched`.
  void watch(int sequence, DecoderObserver* observer);

  void set_sampling(int sequence, const SamplingOptions& options, std::uint64_t counter = 0) {
    batch_.set_sampling(sequence, options, counter);
  }
  /// Sets the token that the next step feeds.
  void set_next(int sequence, std::int32_t id);
  /// Whether the cache evicts tokens. If so, fed tokens cannot be removed.
  bool evicts() const { return options_.evicts(); }
  /// Whether fed tokens can be removed, because no token is evicted and no layer's window has
  /// dropped tokens.
  bool can_forget() const;
  /// Removes all but the first `tokens` tokens. Throws std::logic_error if that is impossible.
  /// Without eviction, removing all tokens is always possible.
  void rewind(int sequence, std::uint32_t tokens);
  /// For benchmarks: fills all sequences with random keys and values instead of prompts of `tokens`
  /// tokens.
  void pretend(std::uint32_t tokens);

  /// Number of times that choose() or step() has sampled.
  std::uint64_t published() const { return batch_.published(); }
  /// Waits for the ids [rows] that were sampled the `index`-th time, counted from 0. Only the last
  /// kRing samplings are available.
  std::span<const std::int32_t> ids(std::uint64_t index) const { return batch_.ids(index); }
  static constexpr int kRing = BatchState::kRing;
  /// Waits, and returns the logits [vocab] of a sequence's last token.
  std::vector<float> logits(int sequence) const;
  /// Enqueues a copy of the logits of a sequence's last token to device memory.
  void copy_logits(int sequence, float* to) const;
  std::uint32_t tokens(int sequence) const {  ///< fed so far
    return fed_.at(static_cast<std::size_t>(sequence));
  }

  const DeviceModel& model() const { return model_; }
  std::vector<std::vector<std::uint32_t>> kept(int sequence) const {
    return cache_->kept(sequence, tokens(sequence));
  }
  std::uint64_t live_bytes(int sequence) const {  ///< bytes of the sequence's live keys and values
    return cache_->live_bytes(sequence, tokens(sequence));
  }
  std::uint64_t evictions(int sequence) const {  ///< over all layers and KV heads
    return cache_->evictions(sequence, append_start_.at(static_cast<std::size_t>(sequence)));
  }
  cudaStream_t stream() const { return stream_.get(); }
  void synchronize() const { stream_.synchronize("decoding"); }

  /// The outputs of all layers for the last step's token, laid out as a CaptureShape of one token.
  const std::byte* step_capture() const { return outputs_.step_data(); }

  /// A step of the first `rows` sequences, for benchmarks. It must not outlive the decoder.
  DecodeStep decode_step(int rows) { return decode_step(rows, Next::sampled); }

 private:
  using Next = DecodeStep::Next;
  struct Piece;

  /// Checks the options before anything is allocated, and returns them. Throws
  /// std::invalid_argument for contradictory options, and std::runtime_error that says how much
  /// memory is needed and what would fit.
  static CudaDecoderOptions validate_options(const DeviceModel& model,
                                             const CudaDecoderOptions& options);
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
  // [sequence]: tokens fed, and how many of them were fed before the last append.
  std::vector<std::uint32_t> fed_, append_start_;
  cuda::Placed<DecoderWork> work_;
  cuda::Placed<DecoderWork> append_;  // hidden states of an append that exceeds the work buffers
  cuda::DeviceBuffer kept_logits_;    // logits of other sequences, while one is fed
  cuda::DeviceBuffer logit_rows_;     // [kLogitRows, vocab], allocated when first needed
  std::map<std::pair<int, Next>, cuda::Graph> graphs_;
};

}  // namespace kvlab
