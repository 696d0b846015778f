// Copies between host and device that nothing waits for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/host/memory.hpp"

namespace kvlab {

/// A prompt's ids on their way to the device.
class PromptIds {
 public:
  explicit PromptIds(cudaStream_t stream) : stream_(stream) {}

  /// Copies behind what is on the stream; the ids may go when it returns. Grows where it must, and
  /// then waits. Returns where they are in device memory, until the next call.
  const std::int32_t* upload(std::span<const std::int32_t> ids);

 private:
  cudaStream_t stream_;
  cuda::DeviceBuffer device_;
  cuda::PinnedBuffer staged_;
  cuda::Event copied_;
  bool pending_ = false;
};

/// Logits on their way to the host: copied behind the steps that compute them, so that the device
/// does not wait for the host to read each.
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
