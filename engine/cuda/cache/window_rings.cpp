#include "engine/cuda/cache/window_rings.hpp"

#include <algorithm>

#include "engine/cuda/fill.hpp"
#include "kernels/attention.hpp"
#include "kernels/cache/rope_rows.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {

using cuda::check;
using cuda::Placed;

namespace {

/// The number of slots of each layer's ring: the size of the window or, if that is less, the
/// maximum length of a sequence.
std::vector<int> ring_slots(const ModelConfig& config, const CudaDecoderOptions& options) {
  std::vector<int> slots;
  for (const RowSpec& row : config.rows)
    slots.push_back(
        static_cast<int>(options.slots > 0 ? std::min(row.window, options.slots) : row.window));
  return slots;
}

/// Number of slots for a prompt's tokens while they go through a layer, including slots for the
/// older tokens that the first of them sees.
int prompt_slots(const ModelConfig& config, const CudaDecoderOptions& options) {
  const auto slots = ring_slots(config, options);
  const int max_ring = std::ranges::max(slots);
  return max_ring == 0 ? 0 : max_ring + options.rows();
}

std::size_t half_bytes(const DeviceModel& model, std::size_t slots) {
  return slots * model.config().kv_heads * model.key_bytes();
}

}  // namespace

WindowRings::Storage::Storage(cuda::Arena& arena, const DeviceModel& model,
                              const CudaDecoderOptions& options) {
  std::size_t all = 0;
  for (const int slots : ring_slots(model.config(), options))
    all += static_cast<std::size_t>(slots) * static_cast<std::size_t>(options.sequences);
  keys = arena.take<std::byte>(half_bytes(model, all));
  values = arena.take<std::byte>(half_bytes(model, all));
}

WindowRings::Work::Work(cuda::Arena& arena, const DeviceModel& model,
                        const CudaDecoderOptions& options) {
  const auto slots = static_cast<std::size_t>(prompt_slots(model.config(), options));
  const int ring = std::ranges::max(ring_slots(model.config(), options));
  keys = arena.take<std::byte>(half_bytes(model, slots));
  values = arena.take<std::byte>(half_bytes(model, slots));
  iota = arena.take<std::int32_t>(slots);
  zeros = arena.take<std::int32_t>(ring > 0 ? static_cast<std::size_t>(options.rows()) : 0);
  workspace =
      arena.take<std::byte>(ring > 0 ? kernels::decode_attention_workspace(
                                           model.attention_shape(ring), options.sequences, ring)
                                     : 0);
}

WindowRings::WindowRings(const DeviceModel& model, const BatchState& batch,
                         const CudaDecoderOptions& options, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      sequences_(options.sequences),
      prompt_slots_(prompt_slots(config_, options)),
      stream_(stream),
      slots_(ring_slots(config_, options)),
      storage_("the rings of layers with a window", model, options),
      work_("prompts of layers with a window", model, options) {
  std::size_t before = 0;
  for (const int slots : slots_) {
    first_.push_back(before);
    before += static_cast<std::size_t>(slots) * static_cast<std::size_t>(sequences_);
  }
  if (prompt_slots_ == 0) return;
  check(cudaMemsetAsync(work_->workspace, 0, kernels::kSignalBytes, stream), "attention");
  check(kernels::fill_iota(work_->iota, prompt_slots_, stream), "a prompt");
  check(cudaMemsetAsync(work_->zeros, 0,
                        static_cast<std::size_t>(options.rows()) * sizeof(std::int32_t), stream),
        "a prompt");
}

CacheBytes WindowRings::bytes(const DeviceModel& model, const CudaDecoderOptions& options) {
  return {Placed<Storage>::bytes(model, options), Placed<Work>::bytes(model, options)};
}

std::uint64_t WindowRings::live_bytes(std::uint32_t fed) const {
  std::uint64_t tokens = 0;
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) tokens += kept(layer, fed);
  return 2 * half_bytes(model_, tokens);
}

kernels::AttentionShape WindowRings::shape(std::uint32_t layer, int slots) const {
  return model_.attention_shape(slots, layer);
}

std::size_t WindowRings::offset(std::uint32_t layer, int sequence) const {
  return half_bytes(model_, first_[layer] + static_cast<std::size_t>(sequence) *
                                                static_cast<std::size_t>(slots_[layer]));
}

kernels::RopeWriteArgs WindowRings::write(std::uint32_t layer) const {
  const kernels::AttentionShape ring = shape(layer, slots_[layer]);
  kernels::RopeWriteArgs args{};
  args.sequences = batch_.rows();
  args.slots = batch_.state().positions;
  args.ring = slots_[layer];
  args.now = reinterpret_cast<const std::uint32_t*>(batch_.state().positions);
  args.cache.keys = storage_->keys + offset(layer, 0);
  args.cache.values = storage_->values + offset(layer, 0);
  args.sequence_stride = ring.sequence_stride;
  args.head_stride = ring.head_stride;
  return args;
}

void WindowRings::attend(std::uint32_t layer, int rows, const std::byte* q,
                         const LayerOutputs& to) const {
  check(kernels::decode_attention({.shape = shape(layer, slots_[layer]),
                                   .sequences = rows,
                                   .slots = slots_[layer],
                                   .q = q,
                                   .keys = storage_->keys + offset(layer, 0),
                                   .values = storage_->values + offset(layer, 0),
                                   .lengths = batch_.state().lengths,
                                   .out = to.out,
                                   .lse = to.lse,
                                   .workspace = work_->workspace,
                                   .settled = true},
                                  stream_),
        "decode attention");
}

kernels::RopeWriteArgs WindowRings::write(std::uint32_t layer, int sequence,
                                          std::uint32_t position) const {
  const std::uint32_t before = older(layer, position);
  copy(layer, sequence, position - before, before, 0, To::prompt);
  const kernels::AttentionShape prompt = shape(layer, prompt_slots_);
  kernels::RopeWriteArgs args{};
  args.sequences = work_->zeros;
  args.slots = work_->iota + before;
  args.cache.keys = work_->keys;
  args.cache.values = work_->values;
  args.sequence_stride = prompt.sequence_stride;
  args.head_stride = prompt.head_stride;
  return args;
}

void WindowRings::attend(std::uint32_t layer, int sequence, std::uint32_t position, int rows,
                         const std::byte* q, const LayerOutputs& to) const {
  const std::uint32_t before = older(layer, position), all = before + static_cast<unsigned>(rows);
  check(kernels::prefill_attention(shape(layer, prompt_slots_),
                                   {.first = static_cast<int>(before),
                                    .queries = rows,
                                    .q = q,
                                    .keys = work_->keys,
                                    .values = work_->values,
                                    .out = to.out,
                                    .lse = to.lse},
                                   static_cast<int>(config_.rows[layer].window), stream_),
        "prefill attention");
  const std::uint32_t staying = std::min(all, static_cast<std::uint32_t>(slots_[layer]));
  copy(layer, sequence, position - before + all - staying, staying, all - staying, To::ring);
}

/// Copies `count` tokens, from position `first` on, from their ring to the prompt's slots or back.
void WindowRings::copy(std::uint32_t layer, int sequence, std::uint32_t first, std::uint32_t count,
                       std::uint32_t prompt_slot, To to) const {
  const auto slots = static_cast<std::uint32_t>(slots_[layer]);
  const std::size_t row = model_.key_bytes(), ring = offset(layer, sequence);
  while (count > 0) {
    const std::uint32_t slot = first % slots, part = std::min(count, slots - slot);
    for (const bool key : {true, false}) {
      std::byte* const ring_rows = (key ? storage_->keys : storage_->values) + ring + slot * row;
      std::byte* const prompt_rows = (key ? work_->keys : work_->values) + prompt_slot * row;
      const std::size_t ring_pitch = slots * row,
                        prompt_pitch = static_cast<std::size_t>(prompt_slots_) * row;
      if (to == To::ring)
        cuda::copy_rows({ring_rows, ring_pitch}, {prompt_rows, prompt_pitch}, part * row,
                        config_.kv_heads, stream_);
      else
        cuda::copy_rows({prompt_rows, prompt_pitch}, {ring_rows, ring_pitch}, part * row,
                        config_.kv_heads, stream_);
    }
    first += part;
    prompt_slot += part;
    count -= part;
  }
}

void WindowRings::pretend() const {
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (const bool key : {true, false}) {
      if (!has(layer)) continue;
      const std::size_t at = offset(layer, 0);
      check(cuda::fill_normal(model_.type(), (key ? storage_->keys : storage_->values) + at,
                              static_cast<std::size_t>(slots_[layer]) * config_.kv_heads *
                                  config_.head_size * static_cast<std::size_t>(sequences_),
                              1.0f, at + (key ? 1 : 0), stream_),
            "filling a cache with random values");
    }
}

}  // namespace kvlab
