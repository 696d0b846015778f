// One sequence on the device, behind the interface of every decoder.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/cuda/async_capture.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/sequence_decoder.hpp"

namespace kvlab {

/// The header of a trace of this model; `options`: how it is run, for the record.
TraceHeader cuda_trace_header(const DeviceModel& model, nlohmann::json options);

class CudaSequence final : public SequenceDecoder {
 public:
  /// `tokens`: the most that it will hold. `prefill_chunk` tokens of a prompt at once, 0: as many
  /// as is good. With a writer, everything goes into that trace.
  struct Options {
    std::uint32_t tokens = 0, prefill_chunk = 0;
    std::optional<ResolvedConfig> cache;  ///< none: the whole cache
    DecoderObserver* observer = nullptr;  ///< of a cache that is given; or null
    TraceWriter* writer = nullptr;
    AsyncCapture::Progress progress;
  };
  /// `model` must outlive it.
  CudaSequence(const DeviceModel& model, Options options);

  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits = nullptr) override;
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t)>& on_id) override;
  void flush() override;
  std::uint32_t tokens() const override { return decoder_.tokens(0); }
  /// It never holds less than before.
  std::uint64_t kv_bytes_peak() const override { return decoder_.live_bytes(0); }
  std::vector<std::vector<std::uint32_t>> kept() const override { return decoder_.kept(0); }
  std::uint64_t evictions() const override { return decoder_.evictions(0); }

 private:
  CudaDecoder decoder_;
  std::unique_ptr<AsyncCapture> capture_;  // or null
  std::vector<float> logits_;
};

}  // namespace kvlab
