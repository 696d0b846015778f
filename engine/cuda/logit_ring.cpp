#include "engine/cuda/logit_ring.hpp"

#include <algorithm>

namespace kvlab {

void LogitRing::take(const float* row, float* to, std::uint32_t vocab) {
  const std::size_t bytes = std::size_t{vocab} * sizeof(float);
  if (staged_.bytes() < kHalves * kRows * bytes)
    staged_ = cuda::PinnedBuffer(kHalves * kRows * bytes);
  vocab_ = vocab;
  std::uint32_t& count = rows_[half_];
  const std::size_t at = std::size_t{half_} * kRows + count;
  cuda::check(cudaMemcpyAsync(staged_.as<float>() + at * vocab, row, bytes, cudaMemcpyDeviceToHost,
                              stream_),
              "reading logits");
  to_[half_][count++] = to;
  if (count < kRows) return;
  copied_[half_].record(stream_);
  half_ = 1 - half_;
  settle(half_);  // the other half travels meanwhile
}

void LogitRing::flush() {
  if (rows_[half_] > 0) copied_[half_].record(stream_);
  settle(1 - half_);
  settle(half_);
}

void LogitRing::settle(std::uint32_t half) {
  if (rows_[half] == 0) return;
  copied_[half].wait("reading logits");
  const float* row = staged_.as<float>() + std::size_t{half} * kRows * vocab_;
  for (std::uint32_t i = 0; i < rows_[half]; ++i, row += vocab_)
    std::copy_n(row, vocab_, to_[half][i]);
  rows_[half] = 0;
}

}  // namespace kvlab
