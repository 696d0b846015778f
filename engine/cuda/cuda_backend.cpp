#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/cuda/device_scores.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/device_limits.hpp"
#include "kernels/host/transfer.hpp"
#include "policies/executor.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kBatchPromptTokens = 2048;  // maximum number of prompt tokens at once

void refuse_eviction(const ResolvedConfig& cache) {
  if (cache.evicts())
    throw std::invalid_argument("a trace is captured with the full cache; leave out --policy");
}

class DeviceLogits final : public LogitMemory {
 public:
  explicit DeviceLogits(std::size_t floats) : buffer_(floats * sizeof(float), "rows of logits") {}
  float* data() override { return buffer_.as<float>(); }
  std::vector<float> to_host() const override { return cuda::download<float>(buffer_); }

 private:
  cuda::DeviceBuffer buffer_;
};

class CudaBatch final : public BatchDecoder {
 public:
  CudaBatch(const DeviceModel& model, CudaDecoderOptions options)
      : decoder_(model, std::move(options)) {}

  void prompt(int first, int count, std::span<const std::int32_t> ids, float* logits) override {
    const std::size_t vocab = decoder_.model().config().vocab;
    for (int sequence = first; sequence < first + count; ++sequence) {
      decoder_.prefill(sequence, ids);
      if (logits)
        decoder_.copy_logits(sequence, logits + static_cast<std::size_t>(sequence - first) * vocab);
    }
    if (logits) decoder_.synchronize();
  }
  void decode(int rows, std::span<const std::int32_t> ids, float* logits) override {
    check_whole_steps(rows, ids.size());
    decoder_.force(rows, ids, logits);
    decoder_.synchronize();
  }
  /// The cache never becomes smaller, so its peak is its current size.
  std::uint64_t kv_bytes_peak(int sequence) const override { return decoder_.live_bytes(sequence); }

 private:
  CudaDecoder decoder_;
};

class CudaBackend final : public Backend, public BatchBackend {
 public:
  explicit CudaBackend(const std::filesystem::path& directory)
      : model_(DeviceModel::load(directory)) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::string weights_xxh3() const override { return model_.weights_xxh3(); }
  std::shared_ptr<const OutputProjections> output_projections() const override {
    return model_.output_projections();
  }
  std::optional<Dtype> rounding() const override { return model_.dtype(); }

  std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache,
                                           std::uint32_t tokens) override {
    if (!cache.evicts() && !cache.policy.tier_plan.is_quantized())
      return sequence({.tokens = tokens, .prefill_chunk = cache.prefill.chunk});
    return sequence({.tokens = tokens, .cache = cache});
  }

  std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache,
                                                   std::uint32_t tokens,
                                                   DecoderObserver& observer) override {
    return sequence({.tokens = tokens, .cache = cache, .observer = &observer});
  }

  BatchBackend& batches() override { return *this; }
  const DeviceModel* device_model() const override { return &model_; }
  bool side_by_side(const CacheConfig& one, const CacheConfig& other) const override {
    return kvlab::side_by_side(one, other);
  }
  std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                              std::uint32_t tokens) override {
    CudaDecoderOptions options{.sequences = static_cast<int>(caches.size()),
                               .slots = tokens,
                               .prefill_tokens = std::min(tokens, kBatchPromptTokens),
                               .longest_prompt = tokens};
    if (std::ranges::any_of(caches, [](const ResolvedConfig& cache) {
          return cache.evicts() || cache.policy.tier_plan.is_quantized();
        }))
      options.caches.assign(caches.begin(), caches.end());
    if (!CudaDecoder::fits(model_, options)) return nullptr;
    return std::make_unique<CudaBatch>(model_, std::move(options));
  }

  std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) override {
    return std::make_unique<DeviceLogits>(floats);
  }

  std::vector<RowScore> score(const ScoredRows& rows) override {
    return device_scores(rows, model_.config().vocab);
  }

  TraceHeader trace_header(nlohmann::json options) const override {
    return cuda_trace_header(model_, std::move(options));
  }

  std::unique_ptr<SequenceDecoder> capturing_decoder(
      const ResolvedConfig& cache, std::uint32_t tokens, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) override {
    refuse_eviction(cache);
    return sequence({.tokens = tokens,
                     .prefill_chunk = cache.prefill.chunk,
                     .writer = &writer,
                     .progress = std::move(progress)});
  }

 private:
  std::unique_ptr<SequenceDecoder> sequence(CudaSequence::Options options) {
    return std::make_unique<CudaSequence>(model_, std::move(options));
  }

  DeviceModel model_;
};

}  // namespace

bool cuda_in_build() { return true; }

std::string cuda_description() { return kernels::cuda_description(); }

bool has_cuda_device() { return cuda::has_device(); }

std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path& directory) {
  if (!has_cuda_device())
    throw std::runtime_error("--device: no CUDA device on this machine; use --device cpu");
  if (const std::string why = kernels::why_not_device(); !why.empty())
    throw std::runtime_error("--device: " + why + "; or use --device cpu");
  return std::make_unique<CudaBackend>(directory);
}

}  // namespace kvlab
