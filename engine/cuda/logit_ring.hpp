// Rows of logits on their way to the host: copied behind the steps that compute them, so that the
// device does not wait for the host to read each.
#pragma once

#include <array>
#include <cstdint>

#include "engine/cuda/memory.hpp"

namespace kvlab {

class LogitRing {
 public:
  explicit LogitRing(cudaStream_t stream) : stream_(stream) {}

  /// Enqueues the copy of a row [vocab] from device memory; it is in `to` after flush() at the
  /// latest. All rows until then have one size.
  void take(const float* row, float* to, std::uint32_t vocab);
  /// Waits.
  void flush();

 private:
  static constexpr std::uint32_t kHalves = 2, kRows = 32;  // kRows: of each half

  void settle(std::uint32_t half);

  cudaStream_t stream_;
  cuda::PinnedBuffer staged_;  // [half, row, vocab]
  std::array<cuda::Event, kHalves> copied_;
  std::array<std::array<float*, kRows>, kHalves> to_{};
  std::array<std::uint32_t, kHalves> rows_{};  // on their way
  std::uint32_t half_ = 0, vocab_ = 0;
};

}  // namespace kvlab
