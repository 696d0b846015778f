#include "engine/backend.hpp"

#include <algorithm>

#include "engine/capture.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

/// A decoder and what watches it.
class CapturedDecoder final : public SequenceDecoder {
 public:
  CapturedDecoder(const Model& model, const ResolvedConfig& cache, unsigned threads,
                  TraceWriter& writer, std::function<void(std::uint32_t)> progress)
      : capture_(writer, std::move(progress)), decoder_(model, cache, threads) {
    decoder_.watch(&capture_);
  }
  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits) override {
    return decoder_.feed(ids, kind, all_logits);
  }
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t)>& on_id) override {
    decoder_.extend(sampler, count, on_id);
  }
  std::uint32_t tokens() const override { return decoder_.tokens(); }
  std::uint64_t kv_bytes_peak() const override { return decoder_.kv_bytes_peak(); }
  std::uint64_t evictions() const override { return decoder_.evictions(); }

 private:
  Capture capture_;
  Decoder decoder_;
};

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

class CpuBackend final : public Backend {
 public:
  CpuBackend(const std::filesystem::path& directory, unsigned threads)
      : model_(Model::load(directory, threads)), threads_(threads) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::string weights_xxh3() const override { return model_.weights_xxh3(); }
  std::optional<Dtype> rounding() const override { return std::nullopt; }
  std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache, std::uint32_t) override {
    return std::make_unique<Decoder>(model_, cache, threads_);
  }
  std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache, std::uint32_t,
                                                   DecoderObserver& observer) override {
    auto decoder = std::make_unique<Decoder>(model_, cache, threads_);
    decoder->watch(&observer);
    return decoder;
  }
  std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) override {
    return std::make_unique<HostLogits>(floats);
  }
  std::vector<RowScore> score(const ScoredRows& rows) override {
    const std::size_t vocab = model_.config().vocab;
    std::vector<RowScore> scores(rows.next.size());
    parallel_for(scores.size(), threads_, [&](std::size_t i) {
      if (rows.next[i] < 0) return;
      const auto of_yardstick = static_cast<std::size_t>(rows.yardstick_rows[i]);
      scores[i] = score_row(std::span(rows.yardstick + of_yardstick * vocab, vocab),
                            std::span(rows.logits + i * vocab, vocab), rows.next[i]);
    });
    return scores;
  }
  TraceHeader trace_header(nlohmann::json options) const override {
    return kvlab::trace_header(model_, std::move(options));
  }
  std::unique_ptr<SequenceDecoder> capturing_decoder(
      const ResolvedConfig& cache, std::uint32_t, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) override {
    return std::make_unique<CapturedDecoder>(model_, cache, threads_, writer, std::move(progress));
  }

 private:
  Model model_;
  unsigned threads_;
};

}  // namespace

std::unique_ptr<BatchDecoder> Backend::batch_decoder(std::span<const ResolvedConfig> caches,
                                                     std::uint32_t tokens) {
  std::vector<std::unique_ptr<SequenceDecoder>> decoders;
  for (const ResolvedConfig& cache : caches) decoders.push_back(decoder(cache, tokens));
  return std::make_unique<SideBySide>(std::move(decoders), config().vocab);
}

std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads) {
  if (device == Device::cuda) return load_cuda_backend(directory);
  return std::make_unique<CpuBackend>(directory, threads);
}

}  // namespace kvlab
