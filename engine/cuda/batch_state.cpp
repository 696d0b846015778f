#include "engine/cuda/batch_state.hpp"

#include <stdexcept>

#include "kernels/pointwise.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;

constexpr std::size_t kWords = 5;  // of each row: ids, positions, slots, lengths, rows

std::size_t state_bytes(std::size_t rows) {
  return kWords * rows * sizeof(std::int32_t) + sizeof(std::uint64_t);
}

}  // namespace

BatchState::BatchState(int sequences, std::uint32_t vocab, cudaStream_t stream)
    : sequences_(sequences), vocab_(static_cast<int>(vocab)), stream_(stream) {
  const auto rows = static_cast<std::size_t>(sequences);
  memory_ = DeviceBuffer(state_bytes(rows), "the batch");
  step_count_ = memory_.as<std::uint64_t>();  // first: it has to be aligned
  auto* const words = reinterpret_cast<std::int32_t*>(step_count_ + 1);
  state_ = {.ids = words,
            .positions = words + rows,
            .slots = words + 2 * rows,
            .lengths = words + 3 * rows};
  rows_ = words + 4 * rows;
  temperature_ = DeviceBuffer(rows * sizeof(float), "sampling");
  top_p_ = DeviceBuffer(rows * sizeof(float), "sampling");
  top_k_ = DeviceBuffer(rows * sizeof(std::int32_t), "sampling");
  seed_ = DeviceBuffer(rows * sizeof(std::uint64_t), "sampling");
  counter_ = DeviceBuffer(rows * sizeof(std::uint64_t), "sampling");
  workspace_ = DeviceBuffer(kernels::sample_workspace(sequences, vocab_), "sampling");
  ring_ = cuda::PinnedBuffer(kRing * rows * sizeof(std::int32_t));
  check(cudaMemsetAsync(memory_.data(), 0, memory_.bytes(), stream), "the batch");
  check(cuda::fill_iota(rows_, sequences, stream), "the batch");
  for (int row = 0; row < sequences; ++row) set_sampling(row, {}, 0);
}

std::size_t BatchState::bytes(int sequences, std::uint32_t vocab) {
  return state_bytes(static_cast<std::size_t>(sequences)) +
         kernels::sample_workspace(sequences, static_cast<int>(vocab));
}

template <class T>
void BatchState::put(T* to, T value) {
  check(cudaMemcpyAsync(to, &value, sizeof value, cudaMemcpyHostToDevice, stream_),
        "writing the batch's state");
}

void BatchState::set_sampling(int row, const SamplingOptions& options, std::uint64_t counter) {
  put(temperature_.as<float>() + row, static_cast<float>(options.temperature));
  put(top_p_.as<float>() + row, static_cast<float>(options.top_p));
  put(top_k_.as<std::int32_t>() + row, static_cast<std::int32_t>(options.top_k));
  put(seed_.as<std::uint64_t>() + row, options.seed);
  put(counter_.as<std::uint64_t>() + row, counter);
}

void BatchState::set_next(int row, std::int32_t id) { put(state_.ids + row, id); }

void BatchState::copy_next(int first_row, const std::int32_t* ids, int rows) {
  check(cudaMemcpyAsync(state_.ids + first_row, ids, static_cast<std::size_t>(rows) * sizeof *ids,
                        cudaMemcpyDeviceToDevice, stream_),
        "writing the batch's state");
}

void BatchState::set_row(int row, const Row& state) {
  put(state_.positions + row, state.position);
  put(state_.slots + row, state.slot);
  put(state_.lengths + row, state.length);
}

void BatchState::sample(int rows, const float* logits) {
  check(kernels::sample({.rows = rows,
                         .vocab = vocab_,
                         .logits = logits,
                         .temperature = temperature_.as<float>(),
                         .top_p = top_p_.as<float>(),
                         .top_k = top_k_.as<std::int32_t>(),
                         .seed = seed_.as<std::uint64_t>(),
                         .counter = counter_.as<std::uint64_t>(),
                         .ids = state_.ids,
                         .workspace = workspace_.data()},
                        stream_),
        "sampling");
}

void BatchState::finish(int rows, bool advance) {
  check(cuda::finish_step({.state = state_,
                           .rows = rows,
                           .advance = advance,
                           .ring = ring_.as<std::int32_t>(),
                           .ring_rows = kRing,
                           .ring_width = sequences_,
                           .step = step_count_},
                          stream_),
        "the end of a step");
}

void BatchState::advance(int rows) {
  check(cuda::advance(state_, rows, stream_), "the end of a step");
}

void BatchState::note_published() {
  ring_events_[published_ % kRing].record(stream_);
  ++published_;
}

std::span<const std::int32_t> BatchState::ids(std::uint64_t index) const {
  if (index >= published_ || published_ - index > kRing)
    throw std::invalid_argument("CUDA decoder: those ids are not in the ring");
  const std::size_t at = index % kRing, width = static_cast<std::size_t>(sequences_);
  ring_events_[at].wait("a decode step");
  return {ring_.as<const std::int32_t>() + at * width, width};
}

}  // namespace kvlab
