// State of a batch's sequences that lasts from step to step, in device memory: the next token, its
// position, and how it is sampled. Also a ring of pinned memory, through which the host receives
// the sampled ids.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "engine/cuda/fill.hpp"
#include "engine/sampler.hpp"
#include "kernels/host/arena.hpp"

namespace kvlab {

class BatchState {
 public:
  static constexpr int kRing = 16;

  /// Makes the state of `sequences` rows, one for each sequence. The constructor and all calls
  /// below enqueue on `stream`.
  BatchState(int sequences, std::uint32_t vocab, cudaStream_t stream);
  /// Bytes of device memory that the state needs.
  static std::size_t bytes(int sequences, std::uint32_t vocab) {
    return cuda::Placed<Parts>::bytes(sequences, vocab);
  }

  void set_sampling(int row, const SamplingOptions& options, std::uint64_t counter);
  void set_next(int row, std::int32_t id);
  /// Copies the next ids of `rows` rows from device memory, without the host.
  void copy_next(int first_row, const std::int32_t* ids, int rows);
  /// One row of cuda::StepState.
  struct Row {
    std::int32_t position, slot, length;
  };
  void set_row(int row, const Row& to);

  /// Samples the rows' next ids from logits [row, vocab].
  void sample(int rows, const float* logits);
  /// Publishes the sampled ids. With `advance`, also calls advance() for the rows, because each was
  /// fed a token.
  void finish(int rows, bool advance);
  void advance(int rows);

  /// Records that ids were published. Call it after finish(), outside of a graph.
  void note_published();
  std::uint64_t published() const { return published_; }
  std::span<const std::int32_t> ids(std::uint64_t index) const;

  const cuda::StepState& state() const { return memory_->state; }
  const std::int32_t* rows() const { return memory_->rows; }  ///< the numbers 0, 1, 2, …

 private:
  struct Parts {
    Parts(cuda::Arena& arena, int sequences, std::uint32_t vocab);
    cuda::StepState state{};
    std::int32_t* rows;
    std::uint64_t* step_count;
    float *temperature, *top_p;  // [row], like the arrays in the next two lines
    std::int32_t* top_k;
    std::uint64_t *seed, *counter;
    std::size_t zeroed;  ///< bytes of all members above, which start as zeros
    std::byte* workspace;
  };
  template <class T>
  void put(T* to, T value);

  int sequences_, vocab_;
  cudaStream_t stream_;
  cuda::Placed<Parts> memory_;
  cuda::PinnedBuffer ring_;  // [kRing, row]
  std::array<cuda::Event, kRing> ring_events_;
  std::uint64_t published_ = 0;
};

}  // namespace kvlab
