// Sequences that are fed tokens side by side, each behind its own prompt.
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

/// Memory for rows of logits where a backend computes and scores them.
class LogitMemory {
 public:
  virtual ~LogitMemory() = default;
  virtual float* data() = 0;
  virtual std::vector<float> to_host() const = 0;
};

class BatchDecoder {
 public:
  virtual ~BatchDecoder() = default;

  /// Appends a prompt of at least one token, the same one for `count` sequences from `first` on,
  /// behind what each was fed before. `logits`: where to put those of its last token [sequence,
  /// vocab], in the backend's LogitMemory, or null. Throws std::out_of_range for an id outside the
  /// vocabulary.
  virtual void prompt(int first, int count, std::span<const std::int32_t> ids, float* logits) = 0;
  /// Feeds the first `rows` sequences decoded tokens, ids [step, row]. `logits`: where to put those
  /// of every step and row [step, row, vocab], in the backend's LogitMemory, or null. Throws as
  /// prompt() does, and std::invalid_argument for ids that are not whole steps.
  virtual void decode(int rows, std::span<const std::int32_t> ids, float* logits) = 0;
  /// Keys and values that a sequence held at most, all layers and heads.
  virtual std::uint64_t kv_bytes_peak(int sequence) const = 0;
};

/// A model on a device that decodes sequences side by side, and scores their logits where they are.
class BatchBackend {
 public:
  virtual ~BatchBackend() = default;
  virtual const ModelConfig& config() const = 0;
  /// Whether two caches can be in one batch decoder; not on a CUDA device if they are of two
  /// policies, or of two kinds of positions.
  virtual bool side_by_side(const CacheConfig& /*one*/, const CacheConfig& /*other*/) const {
    return true;
  }
  /// For a sequence of at most `tokens` for each cache. Null if the memory is too small; throws
  /// std::invalid_argument for caches that cannot be side by side.
  virtual std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                                      std::uint32_t tokens) = 0;
  /// Throws std::runtime_error if the memory is too small.
  virtual std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) = 0;
  /// [row].
  virtual std::vector<RowScore> score(const ScoredRows& rows) = 0;
};

/// Throws std::invalid_argument.
inline void check_whole_steps(int rows, std::size_t ids) {
  if (rows < 1 || ids == 0 || ids % static_cast<std::size_t>(rows) != 0)
    throw std::invalid_argument("batch: the ids should be a step or more of so many rows");
}

}  // namespace kvlab
