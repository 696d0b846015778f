// Asynchronous copies between host and device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/host/memory.hpp"

namespace kvlab {

/// Uploads a prompt's ids to the device.
class PromptIds {
 public:
  explicit PromptIds(cudaStream_t stream) : stream_(stream) {}

  /// Enqueues a copy on the stream; the caller may free `ids` when upload() returns. Waits for the
  /// previous copy. If the buffers have to grow, also waits for the stream. Returns the ids in
  /// device memory, valid until the next call.
  const std::int32_t* upload(std::span<const std::int32_t> ids);

 private:
  cudaStream_t stream_;
  cuda::DeviceBuffer device_;
  cuda::PinnedBuffer staged_;
  cuda::Event copied_;
  bool pending_ = false;
};

/// Downloads logits to the host. The copies are enqueued after the steps that compute the logits,
/// so that the device does not wait until the host has read the logits of each step.
class LogitRing {
 public:
  explicit LogitRing(cudaStream_t stream) : stream_(stream) {}

  /// Enqueues a copy of `floats` floats from device memory to `to`. The copy is complete after
  /// flush() at the latest.
  void take(const float* logits, float* to, std::size_t floats);
  /// Waits for all copies.
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
  std::array<std::vector<Copy>, kHalves> copies_;  // enqueued copies
  std::size_t half_ = 0,
              filled_ = 0;  // the half that is being filled, and the number of floats in it
};

}  // namespace kvlab
