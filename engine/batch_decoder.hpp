// Decodes a batch of sequences, each after its own prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/sampler.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

/// Memory in which a backend computes rows of logits and scores them.
class LogitMemory {
 public:
  virtual ~LogitMemory() = default;
  virtual float* data() = 0;
  virtual std::vector<float> to_host() const = 0;
};

class BatchDecoder {
 public:
  virtual ~BatchDecoder() = default;

  /// Appends the same prompt of at least one token to `count` sequences, beginning with sequence
  /// `first`. `logits`: where to write the logits of the last token [sequence, vocab], in the
  /// backend's LogitMemory; may be null. Throws std::out_of_range for an id outside the vocabulary.
  virtual void prompt(int first, int count, std::span<const std::int32_t> ids, float* logits) = 0;
  /// Feeds decoded tokens `ids` [step, row] to the first `rows` sequences. `logits`: where to write
  /// the logits of every step and row [step, row, vocab], in the backend's LogitMemory; may be
  /// null. Throws as prompt() does, and std::invalid_argument if `ids` is not a whole number of
  /// steps.
  virtual void decode(int rows, std::span<const std::int32_t> ids, float* logits) = 0;
  /// Peak bytes of a sequence's keys and values, over all layers and heads.
  virtual std::uint64_t kv_bytes_peak(int sequence) const = 0;
};

/// A model that decodes batches of sequences and scores their logits on the device.
class BatchBackend {
 public:
  virtual ~BatchBackend() = default;
  virtual const ModelConfig& config() const = 0;
  /// Whether two caches can share one batch decoder. On a CUDA device they need the same policy and
  /// the same kind of positions.
  virtual bool side_by_side(const CacheConfig& /*one*/, const CacheConfig& /*other*/) const {
    return true;
  }
  /// Makes a decoder with one sequence of at most `tokens` tokens for each cache. Returns null if
  /// the memory is too small. Throws std::invalid_argument if the caches cannot share a decoder.
  virtual std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                                      std::uint32_t tokens) = 0;
  /// Allocates memory for `floats` logits. Throws std::runtime_error if the device's memory is too
  /// small.
  virtual std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) = 0;
  /// Returns the score of each row, [row].
  virtual std::vector<RowScore> score(const ScoredRows& rows) = 0;
};

/// Throws std::invalid_argument unless `ids` is a positive multiple of `rows`.
inline void check_whole_steps(int rows, std::size_t ids) {
  if (rows < 1 || ids == 0 || ids % static_cast<std::size_t>(rows) != 0)
    throw std::invalid_argument(
        "batch: the number of ids should be a positive multiple of the number of sequences");
}

}  // namespace kvlab
