#include "engine/backend.hpp"

#include <stdexcept>

#include "engine/batch_decoder.hpp"
#include "engine/capture.hpp"
#include "engine/decoder.hpp"
#include "engine/draft/drafting_decoder.hpp"
#include "policies/executor.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

// Batches of sequences on the CPU.

/// CPU decoders that take each step together and read the weights once for all of them.
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

class CpuBatches final : public BatchBackend {
 public:
  /// `model` must outlive this object.
  CpuBatches(const Model& model, unsigned threads) : model_(model), threads_(threads) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                              std::uint32_t) override {
    return std::make_unique<SideBySide>(model_, caches, threads_);
  }
  std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) override {
    return std::make_unique<HostLogits>(floats);
  }
  std::vector<RowScore> score(const ScoredRows& rows) override {
    const std::size_t vocab = config().vocab;
    std::vector<RowScore> scores(rows.next.size());
    parallel_for(scores.size(), threads_, [&](std::size_t i) {
      if (rows.next[i] < 0) return;
      const auto baseline_row = static_cast<std::size_t>(rows.baseline_rows[i]);
      scores[i] = score_row(std::span(rows.baseline + baseline_row * vocab, vocab),
                            std::span(rows.logits + i * vocab, vocab), rows.next[i]);
    });
    return scores;
  }

 private:
  const Model& model_;
  unsigned threads_;
};

/// A decoder that owns its observer, which writes the trace.
class CapturedDecoder final : public Decoder {
 public:
  CapturedDecoder(const Model& model, const ResolvedConfig& cache, unsigned threads,
                  TraceWriter& writer, std::function<void(std::uint32_t)> progress)
      : Decoder(model, cache, threads), capture_(writer, std::move(progress)) {
    watch(&capture_);
  }

 private:
  Capture capture_;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Model& model, unsigned threads)
      : model_(model), threads_(threads), batches_(model_, threads) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::string weights_xxh3() const override { return model_.weights_xxh3(); }
  std::shared_ptr<const OutputProjections> output_projections() const override {
    return model_.output_projections();
  }
  std::optional<Dtype> rounding() const override { return std::nullopt; }
  std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache, std::uint32_t) override {
    return std::make_unique<Decoder>(model_, cache, threads_);
  }
  std::unique_ptr<DraftingDecoder> drafting_decoder(const ResolvedConfig& drafter,
                                                    DraftOptions options) override {
    return std::make_unique<DraftingDecoder>(model_, drafter, std::move(options), threads_);
  }
  std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache, std::uint32_t,
                                                   DecoderObserver& observer) override {
    auto decoder = std::make_unique<Decoder>(model_, cache, threads_);
    decoder->watch(&observer);
    return decoder;
  }
  BatchBackend& batches() override { return batches_; }
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
  CpuBatches batches_;
};

}  // namespace

std::unique_ptr<DraftingDecoder> Backend::drafting_decoder(const ResolvedConfig&, DraftOptions) {
  throw std::invalid_argument(cpu_only("--draft-policy"));
}

std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads) {
  if (device == Device::cuda) return load_cuda_backend(directory);
  return cpu_backend(Model::load(directory, threads), threads);
}

std::unique_ptr<Backend> cpu_backend(const Model& model, unsigned threads) {
  return std::make_unique<CpuBackend>(model, threads);
}

}  // namespace kvlab
