#include "engine/backend.hpp"

#include "engine/capture.hpp"
#include "engine/cpu_backend.hpp"
#include "engine/cpu_batches.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

/// A decoder and what watches it.
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

std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads) {
  if (device == Device::cuda) return load_cuda_backend(directory);
  return cpu_backend(Model::load(directory, threads), threads);
}

std::unique_ptr<Backend> cpu_backend(const Model& model, unsigned threads) {
  return std::make_unique<CpuBackend>(model, threads);
}

}  // namespace kvlab
