// Sequences side by side on the CPU, one decoder after another: what batches are held against.
#pragma once

#include <algorithm>

#include "engine/backend.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {

/// One decoder after another.
class SideBySide final : public BatchDecoder {
 public:
  SideBySide(std::vector<std::unique_ptr<SequenceDecoder>> decoders, std::size_t vocab)
      : decoders_(std::move(decoders)), vocab_(vocab) {}

  void prompt(int sequence, std::span<const std::int32_t> ids) override {
    decoders_.at(static_cast<std::size_t>(sequence))->feed(ids, SegmentKind::prompt);
  }
  void decode(int rows, std::span<const std::int32_t> ids, float* logits) override {
    check_whole_steps(rows, ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      SequenceDecoder& decoder = *decoders_.at(i % static_cast<std::size_t>(rows));
      const auto row = decoder.feed(ids.subspan(i, 1), SegmentKind::decode);
      if (logits) std::ranges::copy(row, logits + i * vocab_);
    }
  }
  std::uint64_t kv_bytes_peak(int sequence) const override {
    return decoders_.at(static_cast<std::size_t>(sequence))->kv_bytes_peak();
  }

 private:
  std::vector<std::unique_ptr<SequenceDecoder>> decoders_;
  std::size_t vocab_;
};

class HostLogits final : public LogitMemory {
 public:
  explicit HostLogits(std::size_t floats) : logits_(floats) {}
  float* data() override { return logits_.data(); }
  std::vector<float> to_host() const override { return logits_; }

 private:
  std::vector<float> logits_;
};

class CpuBatches final : public BatchBackend {
 public:
  /// `backend` must outlive it.
  explicit CpuBatches(Backend& backend) : backend_(backend) {}

  const ModelConfig& config() const override { return backend_.config(); }
  std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                              std::uint32_t tokens) override {
    std::vector<std::unique_ptr<SequenceDecoder>> decoders;
    for (const ResolvedConfig& cache : caches) decoders.push_back(backend_.decoder(cache, tokens));
    return std::make_unique<SideBySide>(std::move(decoders), config().vocab);
  }
  std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) override {
    return std::make_unique<HostLogits>(floats);
  }
  std::vector<RowScore> score(const ScoredRows& rows) override {
    const std::size_t vocab = config().vocab;
    std::vector<RowScore> scores(rows.next.size());
    parallel_for(scores.size(), 2, [&](std::size_t i) {
      if (rows.next[i] < 0) return;
      const auto of_yardstick = static_cast<std::size_t>(rows.yardstick_rows[i]);
      scores[i] = score_row(std::span(rows.yardstick + of_yardstick * vocab, vocab),
                            std::span(rows.logits + i * vocab, vocab), rows.next[i]);
    });
    return scores;
  }

 private:
  Backend& backend_;
};

}  // namespace kvlab
