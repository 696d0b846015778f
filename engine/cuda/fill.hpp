// Small kernels of the engine: random fills, and the end of a decode step.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/types.hpp"

namespace kvlab::cuda {

using kernels::Type;

/// Fills `to` with `count` normally distributed numbers of mean 0. Element i depends only on (seed,
/// i).
cudaError_t fill_normal(Type type, void* to, std::size_t count, float deviation, std::uint64_t seed,
                        cudaStream_t stream);
cudaError_t fill_value(Type type, void* to, std::size_t count, float value, cudaStream_t stream);
/// Sets `found` to whether an element is not finite. Waits for the stream.
cudaError_t has_not_finite(Type type, const void* from, std::size_t count, bool& found,
                           cudaStream_t stream);
/// Whether read data should stay in the L2 cache (because it is read again soon) or be evicted
/// first.
enum class Caching { keep, stream };
/// Reads `bytes` (a multiple of 16) and writes almost nothing, to measure what a read costs.
cudaError_t read_all(const void* from, std::size_t bytes, Caching caching, std::uint32_t* sink,
                     cudaStream_t stream);

/// The state of a batch's sequences. All arrays are [row] in device memory.
struct StepState {
  std::int32_t* ids;        ///< the token to feed next
  std::int32_t* positions;  ///< its position
  std::int32_t* slots;      ///< the slot of its key and value
  std::int32_t*
      lengths;  ///< number of slots that its query sees, including its own; 0: the row is idle
};
/// Publishes the sampled ids: ring[*step % ring_rows, row] = ids[row], then ++*step. If the logits
/// were not finite, the id is -1. It is published as -1, but the next step feeds 0.
struct FinishStepArgs {
  StepState state;
  int rows;
  bool advance;        ///< also call advance()
  std::int32_t* ring;  // [ring_rows, ring_width], pinned host memory
  int ring_rows, ring_width;
  std::uint64_t* step;  ///< in device memory
};
cudaError_t finish_step(const FinishStepArgs& args, cudaStream_t stream);
/// Moves every row that is not idle forward by one token.
cudaError_t advance(const StepState& state, int rows, cudaStream_t stream);

}  // namespace kvlab::cuda
