// Logits on their way to the host: copied behind the steps that compute them, so that the device
// does not wait for the host to read each.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/host/memory.hpp"

namespace kvlab {

class LogitRing {
 public:
  explicit LogitRing(cudaStream_t stream) : stream_(stream) {}

  /// Enqueues a copy of so many floats from device memory; they are in `to` after flush() at the
  /// latest.
  void take(const float* logits, float* to, std::size_t floats);
  /// Waits.
  void flush();

 private:
  static constexpr std::size_t kHalves = 2, kHalfFloats = std::size_t{4} << 20;

  struct Copy {
    std::size_t at, floats;
    float* to;
  };
  void switch_halves();
  void settle(std::size_t half);

  cudaStream_t stream_;
  std::array<cuda::PinnedBuffer, kHalves> staged_;
  std::array<cuda::Event, kHalves> copied_;
  std::array<std::vector<Copy>, kHalves> copies_;  // on their way
  std::size_t half_ = 0, filled_ = 0;              // floats of the half that is being filled
};

}  // namespace kvlab
