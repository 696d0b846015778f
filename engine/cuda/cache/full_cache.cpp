#include "engine/cuda/cache/full_cache.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "engine/cuda/fill.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;

struct WorkSizes {
  std::size_t q, rope, iota, zeros, attention;
  std::size_t sum() const { return q + rope + iota + zeros + attention; }
};

WorkSizes work_sizes(const DeviceModel& model, int sequences, std::uint32_t capacity, int rows) {
  const ModelConfig& config = model.config();
  return {.q = static_cast<std::size_t>(rows) * config.query_heads * config.head_size *
               bytes_of(model.dtype()),
          .rope = capacity * config.rope.inv_freq.size() * sizeof(float2),
          .iota = capacity * sizeof(std::int32_t),
          .zeros = static_cast<std::size_t>(rows) * sizeof(std::int32_t),
          .attention =
              kernels::decode_attention_workspace(model.attention_shape(static_cast<int>(capacity)),
                                                  sequences, static_cast<int>(capacity))};
}

}  // namespace

FullCache::FullCache(const DeviceModel& model, const BatchState& batch, int sequences,
                     std::uint32_t slots, int rows, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      sequences_(sequences),
      slots_(slots),
      rows_(rows),
      stream_(stream),
      shape_(model.attention_shape(static_cast<int>(capacity(slots)))) {
  const WorkSizes size = work_sizes(model, sequences, capacity(slots), rows);
  const std::size_t half = static_cast<std::size_t>(sequences) * bytes(model, capacity(slots)) / 2;
  keys_ = DeviceBuffer(half, "the cache's keys");
  values_ = DeviceBuffer(half, "the cache's values");
  q_ = DeviceBuffer(size.q, "queries");
  rope_ = DeviceBuffer(size.rope, "RoPE's table");
  iota_ = DeviceBuffer(size.iota, "positions");
  zeros_ = DeviceBuffer(size.zeros, "a prompt's sequence");
  workspace_ = DeviceBuffer(size.attention, "attention");
  check(cudaMemsetAsync(workspace_.data(), 0, kernels::kSignalBytes, stream), "attention");
  // Slots that nothing was written to are never read; the sanitizer is to see it if they are.

  const auto& inv_freq = config_.rope.inv_freq;
  const DeviceBuffer frequencies = cuda::upload(inv_freq, "RoPE's frequencies");
  check(cuda::fill_rope_table(frequencies.as<float>(), static_cast<int>(inv_freq.size()),
                              static_cast<int>(capacity(slots)), config_.rope.factor,
                              rope_.as<float2>(), stream),
        "RoPE's table");
  check(cuda::fill_iota(iota_.as<std::int32_t>(), static_cast<int>(capacity(slots)), stream),
        "positions");
  check(cudaMemsetAsync(zeros_.data(), 0, zeros_.bytes(), stream), "a table");
  check(cudaStreamSynchronize(stream), "RoPE's table");
}

std::uint64_t FullCache::bytes(const DeviceModel& model, std::uint64_t tokens) {
  const ModelConfig& config = model.config();
  return tokens * 2 * config.layers * config.kv_heads * config.head_size * bytes_of(model.dtype());
}

std::uint64_t FullCache::work_bytes(const DeviceModel& model, int sequences, std::uint32_t slots,
                                    int rows) {
  return work_sizes(model, sequences, capacity(slots), rows).sum();
}

BatchState::Row FullCache::row(std::uint32_t fed) const {
  const bool idle = fed == 0;
  return {.position = static_cast<std::int32_t>(fed),
          .slot = static_cast<std::int32_t>(idle ? slots_ : fed),
          .length = static_cast<std::int32_t>(idle ? 0 : fed + 1)};
}

void FullCache::refuse_beyond(std::uint32_t fed, std::uint64_t more) const {
  if (fed + more > slots_)
    throw std::invalid_argument(
        fmt::format("CUDA decoder: {} tokens of a sequence need as many slots; it was made with {}",
                    fed + more, slots_));
}

/// Chunks make no difference where nothing leaves: as many as fit the buffers.
std::uint32_t FullCache::admission_tokens(int /*sequence*/) const {
  return static_cast<std::uint32_t>(rows_);
}

std::uint64_t FullCache::live_bytes(int /*sequence*/, std::uint32_t fed) const {
  return bytes(model_, fed);
}

/// Bytes from the cache's begin to a layer's sequence.
std::size_t FullCache::offset(std::uint32_t layer, int sequence) const {
  const std::size_t at = std::size_t{layer} * static_cast<std::size_t>(sequences_) +
                         static_cast<std::size_t>(sequence);
  return at * static_cast<std::size_t>(shape_.sequence_stride) * bytes_of(model_.dtype());
}

kernels::RopeWriteArgs FullCache::write(std::uint32_t layer, int sequence) {
  kernels::RopeWriteArgs args{};
  args.rotated = static_cast<int>(config_.rope.rotated());
  args.rope = rope_.as<float2>();
  args.keys = keys_.data() + offset(layer, sequence);
  args.values = values_.data() + offset(layer, sequence);
  args.sequence_stride = shape_.sequence_stride;
  args.head_stride = shape_.head_stride;
  args.q = q_.data();
  return args;
}

kernels::RopeWriteArgs FullCache::prompt_write(std::uint32_t layer, const PromptPart& part) {
  kernels::RopeWriteArgs args = write(layer, part.sequence);
  args.positions = args.slots = iota_.as<std::int32_t>() + part.position;
  args.sequences = zeros_.as<std::int32_t>();
  return args;
}

kernels::RopeWriteArgs FullCache::step_write(std::uint32_t layer, int /*rows*/) {
  kernels::RopeWriteArgs args = write(layer, 0);
  args.positions = batch_.state().positions;
  args.slots = batch_.state().slots;
  args.sequences = batch_.rows();
  return args;
}

void FullCache::attend_prompt(std::uint32_t layer, const PromptPart& part, const LayerOutputs& to) {
  check(kernels::prefill_attention({.shape = shape_,
                                    .first = static_cast<int>(part.position),
                                    .queries = part.rows,
                                    .q = q_.data(),
                                    .keys = keys_.data() + offset(layer, part.sequence),
                                    .values = values_.data() + offset(layer, part.sequence),
                                    .out = to.out,
                                    .lse = to.lse},
                                   stream_),
        "prefill attention");
}

void FullCache::attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) {
  check(kernels::decode_attention({.shape = shape_,
                                   .sequences = rows,
                                   .slots = static_cast<int>(capacity(slots_)),
                                   .q = q_.data(),
                                   .keys = keys_.data() + offset(layer, 0),
                                   .values = values_.data() + offset(layer, 0),
                                   .lengths = batch_.state().lengths,
                                   .out = to.out,
                                   .lse = to.lse,
                                   .workspace = workspace_.data(),
                                   .settled = true},
                                  stream_),
        "decode attention");
}

void FullCache::pretend(int sequence, std::uint32_t tokens) {
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
      for (const DeviceBuffer* cache : {&keys_, &values_}) {
        std::byte* const to =
            cache->data() + offset(layer, sequence) +
            head * static_cast<std::size_t>(shape_.head_stride) * bytes_of(model_.dtype());
        check(cuda::fill_normal(model_.type(), to, std::size_t{tokens} * config_.head_size, 1.0f,
                                static_cast<std::uint64_t>(to - cache->data()) + (cache == &keys_),
                                stream_),
              "drawing a cache");
      }
}

}  // namespace kvlab
