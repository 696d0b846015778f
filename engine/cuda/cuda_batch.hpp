// Sequences side by side on the device, fed as they are told to be.
#pragma once

#include <vector>

#include "engine/batch_decoder.hpp"
#include "engine/cuda/cuda_decoder.hpp"

namespace kvlab {

class CudaBatch final : public BatchDecoder {
 public:
  /// Throws as CudaDecoder does.
  CudaBatch(const DeviceModel& model, CudaDecoderOptions options);

  void prompt(int sequence, std::span<const std::int32_t> ids) override;
  void decode(int rows, std::span<const std::int32_t> ids, float* logits) override;
  std::uint64_t kv_bytes_peak(int sequence) const override;

 private:
  CudaDecoder decoder_;
  std::vector<std::uint64_t> kv_bytes_peak_;  // [sequence]
};

}  // namespace kvlab
