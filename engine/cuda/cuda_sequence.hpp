// A SequenceDecoder that decodes one sequence on a CUDA device.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/cuda/async_capture.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/sequence_decoder.hpp"

namespace kvlab {

/// Makes the header of a trace of this model. `options` records how the model is run.
TraceHeader cuda_trace_header(const DeviceModel& model, nlohmann::json options);

class CudaSequence final : public SequenceDecoder {
 public:
  /// `tokens`: maximum length of the sequence. `prefill_chunk`: number of a prompt's tokens that
  /// are fed together; 0: a good default. `writer`: the trace to which the decoder's outputs are
  /// captured; may be null.
  struct Options {
    std::uint32_t tokens = 0, prefill_chunk = 0;
    std::optional<ResolvedConfig> cache;  ///< none: the full cache
    DecoderObserver* observer = nullptr;  ///< observes `cache`; or null
    TraceWriter* writer = nullptr;
    AsyncCapture::Progress progress;
  };
  /// `model` must outlive this object.
  CudaSequence(const DeviceModel& model, Options options);

  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits = nullptr) override;
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t)>& on_id) override;
  void flush() override;
  std::uint32_t tokens() const override { return decoder_.tokens(0); }
  /// The cache never becomes smaller, so its peak is its current size.
  std::uint64_t kv_bytes_peak() const override { return decoder_.live_bytes(0); }
  std::vector<std::vector<std::uint32_t>> kept() const override { return decoder_.kept(0); }
  std::uint64_t evictions() const override { return decoder_.evictions(0); }

 private:
  CudaDecoder decoder_;
  std::unique_ptr<AsyncCapture> capture_;  // or null
  std::vector<float> logits_;
};

}  // namespace kvlab
