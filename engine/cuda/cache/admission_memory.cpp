#include "engine/cuda/cache/admission_memory.hpp"

#include <algorithm>
#include <vector>

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;

std::size_t shrink_bytes(const DeviceModel& model, std::uint32_t slots) {
  return kernels::shrink_workspace(model.slot_cache(1, static_cast<int>(slots)));
}

}  // namespace

AdmissionMemory::AdmissionMemory(const DeviceModel& model, Need need, cudaStream_t stream)
    : model_(model), need_(need), stream_(stream) {
  const ModelConfig& config = model.config();
  lengths_ = DeviceBuffer(config.kv_heads * sizeof(std::int32_t), "an admission");
  next_ = DeviceBuffer(config.kv_heads * sizeof(std::int32_t), "an admission");
  first_slot_ = DeviceBuffer(config.kv_heads * sizeof(std::int64_t), "an admission");
  if (!need.observes) return;
  const auto tokens = static_cast<std::size_t>(need.part_tokens);
  rows_ = DeviceBuffer(tokens * config.query_heads * sizeof(kernels::RowSoftmax), "an admission");
  observe_workspace_ =
      DeviceBuffer(kernels::observe_workspace(shape(), need.part_tokens), "an admission");
}

void AdmissionMemory::reserve(std::uint32_t slots) {
  if (static_cast<int>(slots) <= slots_) return;
  check(cudaStreamSynchronize(stream_), "an admission");
  slots_ = 0;  // until there is memory for them
  const ModelConfig& config = model_.config();
  const std::size_t all = std::size_t{slots} * config.kv_heads;
  const std::size_t bytes = all * config.head_size * bytes_of(model_.dtype());
  for (DeviceBuffer* buffer :
       {&keys_, &values_, &turned_, &positions_, &states_, &seen_, &shrink_workspace_})
    *buffer = DeviceBuffer();  // first give back, then take
  keys_ = DeviceBuffer(bytes, "an admission's keys");
  values_ = DeviceBuffer(bytes, "an admission's values");
  if (need_.squeezed) turned_ = DeviceBuffer(bytes, "an admission's keys by age");
  positions_ = DeviceBuffer(all * sizeof(std::uint32_t), "an admission");
  states_ = DeviceBuffer(all * need_.slot_bytes, "an admission");
  if (need_.observes) seen_ = DeviceBuffer(all * sizeof(Observation), "an admission");
  shrink_workspace_ = DeviceBuffer(shrink_bytes(model_, slots), "an admission");
  slots_ = static_cast<int>(slots);

  std::vector<std::int64_t> first;
  for (std::uint32_t head = 0; head < config.kv_heads; ++head)
    first.push_back(std::int64_t{head} * slots_);
  check(cudaMemcpyAsync(first_slot_.data(), first.data(), first_slot_.bytes(),
                        cudaMemcpyHostToDevice, stream_),
        "an admission");
  check(cudaStreamSynchronize(stream_), "an admission");
}

std::size_t AdmissionMemory::bytes(const DeviceModel& model, const Need& need,
                                   std::uint32_t slots) {
  const ModelConfig& config = model.config();
  const std::size_t all = std::size_t{slots} * config.kv_heads;
  const std::size_t keys = all * config.head_size * bytes_of(model.dtype());
  return (need.squeezed ? 3 : 2) * keys + all * (sizeof(std::uint32_t) + need.slot_bytes) +
         (need.observes ? all * sizeof(Observation) : 0) + shrink_bytes(model, slots);
}

kernels::SlotCache AdmissionMemory::cache() const {
  kernels::SlotCache cache = model_.slot_cache(1, slots_);
  cache.first_slot = first_slot_.as<std::int64_t>();
  cache.keys = keys_.data();
  cache.values = values_.data();
  cache.positions = positions_.as<std::uint32_t>();
  cache.lengths = lengths_.as<std::int32_t>();
  cache.next_slots = next_.as<std::int32_t>();
  return cache;
}

void AdmissionMemory::clear_older() {
  check(cudaMemsetAsync(lengths_.data(), 0, lengths_.bytes(), stream_), "an admission");
  check(cudaMemsetAsync(next_.data(), 0, next_.bytes(), stream_), "an admission");
}

void AdmissionMemory::clear_seen() {
  if (need_.observes)
    check(cudaMemsetAsync(seen_.data(), 0, seen_.bytes(), stream_), "an admission");
}

}  // namespace kvlab
