// What the sequences of a batch carry from step to step, in device memory: the next token, its
// position, and how it is sampled; and the ring of pinned memory through which ids reach the host.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "engine/cuda/fill.hpp"
#include "kernels/host/memory.hpp"
#include "engine/sampler.hpp"

namespace kvlab {

class BatchState {
 public:
  static constexpr int kRing = 16;

  /// Rows are sequences. Enqueues on `stream`, as all that follows does.
  BatchState(int sequences, std::uint32_t vocab, cudaStream_t stream);
  /// Device memory that it needs.
  static std::size_t bytes(int sequences, std::uint32_t vocab);

  void set_sampling(int row, const SamplingOptions& options, std::uint64_t counter);
  void set_next(int row, std::int32_t id);
  /// The same of so many rows, from device memory, without the host.
  void copy_next(int first_row, const std::int32_t* ids, int rows);
  /// cuda::StepState, of one row.
  struct Row {
    std::int32_t position, slot, length;
  };
  void set_row(int row, const Row& state);

  /// Samples the rows' next ids from logits [row, vocab].
  void sample(int rows, const float* logits);
  /// Publishes the ids that were sampled; `advance`: every row has been fed a token, too.
  void finish(int rows, bool advance);
  void advance(int rows);

  /// To be called behind what publishes, outside of a graph.
  void note_published();
  std::uint64_t published() const { return published_; }
  std::span<const std::int32_t> ids(std::uint64_t index) const;

  const cuda::StepState& state() const { return state_; }
  const std::int32_t* rows() const { return rows_; }  ///< [row]: row

 private:
  template <class T>
  void put(T* to, T value);

  int sequences_, vocab_;
  cudaStream_t stream_;
  cuda::DeviceBuffer memory_;
  cuda::StepState state_{};
  std::int32_t* rows_ = nullptr;
  std::uint64_t* step_count_ = nullptr;
  cuda::DeviceBuffer temperature_, top_p_, top_k_, seed_, counter_, workspace_;  // [row]
  cuda::PinnedBuffer ring_;                                                      // [kRing, row]
  std::array<cuda::Event, kRing> ring_events_;
  std::uint64_t published_ = 0;
};

}  // namespace kvlab
