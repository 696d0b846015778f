#include "engine/cuda/batch_state.hpp"

#include <stdexcept>

#include "kernels/cache/rope_rows.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {
namespace {

using cuda::check;

}  // namespace

BatchState::Parts::Parts(cuda::Arena& arena, int sequences, std::uint32_t vocab) {
  const auto rows_count = static_cast<std::size_t>(sequences);
  for (std::int32_t** words : {&state.ids, &state.positions, &state.slots, &state.lengths, &rows})
    *words = arena.take<std::int32_t>(rows_count);
  step_count = arena.take<std::uint64_t>(1);
  temperature = arena.take<float>(rows_count);
  top_p = arena.take<float>(rows_count);
  top_k = arena.take<std::int32_t>(rows_count);
  seed = arena.take<std::uint64_t>(rows_count);
  counter = arena.take<std::uint64_t>(rows_count);
  zeroed = arena.bytes();
  workspace = arena.take<std::byte>(kernels::sample_workspace(sequences, static_cast<int>(vocab)));
}

BatchState::BatchState(int sequences, std::uint32_t vocab, cudaStream_t stream)
    : sequences_(sequences),
      vocab_(static_cast<int>(vocab)),
      stream_(stream),
      memory_("the batch", sequences, vocab),
      ring_(kRing * static_cast<std::size_t>(sequences) * sizeof(std::int32_t)) {
  check(cudaMemsetAsync(memory_.memory().data(), 0, memory_->zeroed, stream), "the batch");
  check(kernels::fill_iota(memory_->rows, sequences, stream), "the batch");
  for (int row = 0; row < sequences; ++row) set_sampling(row, {}, 0);
}

template <class T>
void BatchState::put(T* to, T value) {
  check(cudaMemcpyAsync(to, &value, sizeof value, cudaMemcpyHostToDevice, stream_),
        "writing the batch's state");
}

void BatchState::set_sampling(int row, const SamplingOptions& options, std::uint64_t counter) {
  put(memory_->temperature + row, static_cast<float>(options.temperature));
  put(memory_->top_p + row, static_cast<float>(options.top_p));
  put(memory_->top_k + row, static_cast<std::int32_t>(options.top_k));
  put(memory_->seed + row, options.seed);
  put(memory_->counter + row, counter);
}

void BatchState::set_next(int row, std::int32_t id) { put(state().ids + row, id); }

void BatchState::copy_next(int first_row, const std::int32_t* ids, int rows) {
  check(cudaMemcpyAsync(state().ids + first_row, ids, static_cast<std::size_t>(rows) * sizeof *ids,
                        cudaMemcpyDeviceToDevice, stream_),
        "writing the batch's state");
}

void BatchState::set_row(int row, const Row& to) {
  put(state().positions + row, to.position);
  put(state().slots + row, to.slot);
  put(state().lengths + row, to.length);
}

void BatchState::sample(int rows, const float* logits) {
  check(kernels::sample({.rows = rows,
                         .vocab = vocab_,
                         .logits = logits,
                         .temperature = memory_->temperature,
                         .top_p = memory_->top_p,
                         .top_k = memory_->top_k,
                         .seed = memory_->seed,
                         .counter = memory_->counter,
                         .ids = state().ids,
                         .workspace = memory_->workspace},
                        stream_),
        "sampling");
}

void BatchState::finish(int rows, bool advance) {
  check(cuda::finish_step({.state = state(),
                           .rows = rows,
                           .advance = advance,
                           .ring = ring_.as<std::int32_t>(),
                           .ring_rows = kRing,
                           .ring_width = sequences_,
                           .step = memory_->step_count},
                          stream_),
        "the end of a step");
}

void BatchState::advance(int rows) {
  check(cuda::advance(state(), rows, stream_), "the end of a step");
}

void BatchState::note_published() {
  ring_events_[published_ % kRing].record(stream_);
  ++published_;
}

std::span<const std::int32_t> BatchState::ids(std::uint64_t index) const {
  if (index >= published_ || published_ - index > kRing)
    throw std::invalid_argument("CUDA decoder: these ids are no longer in the ring buffer");
  const std::size_t at = index % kRing, width = static_cast<std::size_t>(sequences_);
  ring_events_[at].wait("a decode step");
  return {ring_.as<const std::int32_t>() + at * width, width};
}

}  // namespace kvlab
