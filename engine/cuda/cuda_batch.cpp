#include "engine/cuda/cuda_batch.hpp"

#include <algorithm>

namespace kvlab {

CudaBatch::CudaBatch(const DeviceModel& model, CudaDecoderOptions options)
    : decoder_(model, options), kv_bytes_peak_(static_cast<std::size_t>(options.sequences)) {}

void CudaBatch::prompt(int sequence, std::span<const std::int32_t> ids) {
  decoder_.prefill(sequence, ids);
  auto& peak = kv_bytes_peak_.at(static_cast<std::size_t>(sequence));
  peak = std::max(peak, decoder_.live_bytes(sequence));
}

void CudaBatch::decode(int rows, std::span<const std::int32_t> ids, float* logits) {
  check_whole_steps(rows, ids.size());
  decoder_.force(rows, ids, logits);
  decoder_.synchronize();
  for (int row = 0; row < rows; ++row) {
    auto& peak = kv_bytes_peak_.at(static_cast<std::size_t>(row));
    peak = std::max(peak, decoder_.live_bytes(row));
  }
}

std::uint64_t CudaBatch::kv_bytes_peak(int sequence) const {
  return kv_bytes_peak_.at(static_cast<std::size_t>(sequence));
}

}  // namespace kvlab
