#include "engine/cuda/host_copies.hpp"

#include <algorithm>

namespace kvlab {

const std::int32_t* PromptIds::upload(std::span<const std::int32_t> ids) {
  if (pending_) copied_.wait("a prompt");  // until the previous copy has read staged_
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

void LogitRing::take(const float* logits, float* to, std::size_t floats) {
  if (filled_ > 0 && filled_ + floats > kHalfFloats) switch_halves();
  if (staged_[half_].bytes() < floats * sizeof(float))  // then the half is empty
    staged_[half_] = cuda::PinnedBuffer(std::max(floats, kHalfFloats) * sizeof(float));
  cuda::check(cudaMemcpyAsync(staged_[half_].as<float>() + filled_, logits, floats * sizeof(float),
                              cudaMemcpyDeviceToHost, stream_),
              "reading logits");
  copies_[half_].push_back({filled_, floats, to});
  filled_ += floats;
}

/// Ends the current half, whose copies to the host may still run. Waits for the copies of the other
/// half and delivers their logits, because that half is filled next.
void LogitRing::switch_halves() {
  copied_[half_].record(stream_);
  half_ = 1 - half_;
  filled_ = 0;
  settle(half_);
}

void LogitRing::flush() {
  switch_halves();
  settle(1 - half_);
}

void LogitRing::settle(std::size_t half) {
  if (copies_[half].empty()) return;
  copied_[half].wait("reading logits");
  for (const Copy& copy : copies_[half])
    std::copy_n(staged_[half].as<float>() + copy.at, copy.floats, copy.to);
  copies_[half].clear();
}

}  // namespace kvlab
