// A prompt's ids on their way to the device, and the indices that go with them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/host/memory.hpp"

namespace kvlab {

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

}  // namespace kvlab
