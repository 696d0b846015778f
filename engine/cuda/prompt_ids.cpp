#include "engine/cuda/prompt_ids.hpp"

#include <algorithm>

namespace kvlab {

const std::int32_t* PromptIds::upload(std::span<const std::int32_t> ids) {
  if (pending_) copied_.wait("a prompt");  // the copy before has been read
  if (ids.size_bytes() > staged_.bytes()) {
    cuda::check(cudaStreamSynchronize(stream_), "a prompt");
    const std::size_t bytes = std::max(ids.size_bytes(), 2 * staged_.bytes());
    device_ = cuda::DeviceBuffer(bytes, "token ids");
    staged_ = cuda::PinnedBuffer(bytes);
  }
  std::ranges::copy(ids, staged_.as<std::int32_t>());
  cuda::check(cudaMemcpyAsync(device_.data(), staged_.data(), ids.size_bytes(),
                              cudaMemcpyHostToDevice, stream_),
              "copying token ids");
  copied_.record(stream_);
  pending_ = true;
  return device_.as<std::int32_t>();
}

}  // namespace kvlab
