#include "engine/backend.hpp"

#include "engine/capture.hpp"

namespace kvlab {
namespace {

/// A decoder and what watches it.
class CapturedDecoder final : public SequenceDecoder {
 public:
  CapturedDecoder(const Model& model, const CacheOptions& cache, unsigned threads,
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

class CpuBackend final : public Backend {
 public:
  CpuBackend(const std::filesystem::path& directory, unsigned threads)
      : model_(Model::load(directory, threads)), threads_(threads) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::string weights_xxh3() const override { return model_.weights_xxh3(); }
  std::unique_ptr<SequenceDecoder> decoder(const CacheOptions& cache, std::uint32_t) override {
    return std::make_unique<Decoder>(model_, cache, threads_);
  }
  std::unique_ptr<SequenceDecoder> watched_decoder(const CacheOptions& cache, std::uint32_t,
                                                   DecoderObserver& observer) override {
    auto decoder = std::make_unique<Decoder>(model_, cache, threads_);
    decoder->watch(&observer);
    return decoder;
  }
  TraceHeader trace_header(nlohmann::json options) const override {
    return kvlab::trace_header(model_, std::move(options));
  }
  std::unique_ptr<SequenceDecoder> capturing_decoder(
      const CacheOptions& cache, std::uint32_t, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) override {
    return std::make_unique<CapturedDecoder>(model_, cache, threads_, writer, std::move(progress));
  }

 private:
  Model model_;
  unsigned threads_;
};

}  // namespace

std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads) {
  if (device == Device::cuda) return load_cuda_backend(directory);
  return std::make_unique<CpuBackend>(directory, threads);
}

}  // namespace kvlab
