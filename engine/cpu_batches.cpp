#include "engine/cpu_batches.hpp"

#include "engine/decoder.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

/// Decoders that read the weights together.
class SideBySide final : public BatchDecoder {
 public:
  SideBySide(const Model& model, std::span<const ResolvedConfig> caches, unsigned threads)
      : vocab_(model.config().vocab) {
    for (const ResolvedConfig& cache : caches) {
      decoders_.push_back(std::make_unique<Decoder>(model, cache, threads));
      all_.push_back(decoders_.back().get());
    }
  }

  void prompt(int first, int count, std::span<const std::int32_t> ids, float* logits) override {
    Decoder::prompt(rows(first, count), ids, logits);
  }
  void decode(int count, std::span<const std::int32_t> ids, float* logits) override {
    check_whole_steps(count, ids.size());
    const auto width = static_cast<std::size_t>(count);
    for (std::size_t at = 0; at < ids.size(); at += width)
      Decoder::step(rows(0, count), ids.subspan(at, width),
                    logits ? logits + at * vocab_ : nullptr);
  }
  std::uint64_t kv_bytes_peak(int sequence) const override {
    return decoders_.at(static_cast<std::size_t>(sequence))->kv_bytes_peak();
  }

 private:
  std::span<Decoder* const> rows(int first, int count) const {
    return std::span(all_).subspan(static_cast<std::size_t>(first),
                                   static_cast<std::size_t>(count));
  }

  std::vector<std::unique_ptr<Decoder>> decoders_;
  std::vector<Decoder*> all_;
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

}  // namespace

std::unique_ptr<BatchDecoder> CpuBatches::batch_decoder(std::span<const ResolvedConfig> caches,
                                                        std::uint32_t) {
  return std::make_unique<SideBySide>(model_, caches, threads_);
}

std::unique_ptr<LogitMemory> CpuBatches::logit_memory(std::size_t floats) {
  return std::make_unique<HostLogits>(floats);
}

std::vector<RowScore> CpuBatches::score(const ScoredRows& rows) {
  const std::size_t vocab = config().vocab;
  std::vector<RowScore> scores(rows.next.size());
  parallel_for(scores.size(), threads_, [&](std::size_t i) {
    if (rows.next[i] < 0) return;
    const auto of_yardstick = static_cast<std::size_t>(rows.yardstick_rows[i]);
    scores[i] = score_row(std::span(rows.yardstick + of_yardstick * vocab, vocab),
                          std::span(rows.logits + i * vocab, vocab), rows.next[i]);
  });
  return scores;
}

}  // namespace kvlab
