#include "engine/cuda/cache/observed_attention.hpp"

#include <algorithm>

#include "kernels/linear/linear.hpp"

namespace kvlab {
namespace {

using cuda::check;

std::size_t workspace_bytes(const kernels::EvictionKernels& kernels,
                            const kernels::SlotCache& cache) {
  constexpr std::size_t kAlignment = 256;
  return (kernels.attention_workspace(cache) + kAlignment - 1) / kAlignment * kAlignment;
}

/// Layers with few slots are observed several at once: a branch takes a microsecond.
std::size_t layers_at_once(const kernels::SlotCache& cache, std::size_t most) {
  constexpr std::int64_t kSlots = 1 << 17;
  const std::int64_t slots = std::int64_t{cache.sequences} * cache.kv_heads * cache.most_slots;
  std::size_t layers = most;
  while (layers > 1 && static_cast<std::int64_t>(layers) * slots > kSlots) layers /= 2;
  return layers;
}

/// Products of many rows leave no room on a multiprocessor. The next layer's attention does; but by
/// then the logits have left the L2 cache, so that there must be few of them.
bool beside_attention(const kernels::SlotCache& cache) {
  return cache.sequences > kernels::kMostLinearRows && cache.query_heads <= 2 * cache.kv_heads;
}

}  // namespace

ObservedAttention::ObservedAttention(const kernels::EvictionKernels& kernels,
                                     const kernels::SlotCache& cache, int layers,
                                     cudaStream_t stream)
    : kernels_(kernels),
      stream_(stream),
      workspace_bytes_(workspace_bytes(kernels, cache)),
      workspaces_(bytes(kernels, cache, layers), "attention") {
  for (std::size_t at = 0; at < workspaces_.bytes(); at += workspace_bytes_)
    check(cudaMemsetAsync(workspaces_.data() + at, 0,
                          std::min(workspace_bytes_, kernels::kSignalBytes), stream),
          "attention");
}

std::size_t ObservedAttention::bytes(const kernels::EvictionKernels& kernels,
                                     const kernels::SlotCache& cache, int layers) {
  return workspace_bytes(kernels, cache) * static_cast<std::size_t>(std::min(layers, 2 * kHalf));
}

void ObservedAttention::attend(kernels::EvictingAttentionArgs args) {
  const std::uint32_t layer = args.policy.layer;
  if (layer == 0) waiting_.clear();  // of a step that failed
  if (!waiting_.empty() && beside_attention(args.cache)) branch_off();
  if (layer >= 2 * kHalf && layer % kHalf == 0) observed_[layer / kHalf % 2].hold(stream_);
  args.workspace = workspaces_.data() + layer % (2 * kHalf) * workspace_bytes_;
  check(kernels_.attend(kernels_, args, stream_), "evicting attention");
  waiting_.push_back(args);
}

void ObservedAttention::observe() {
  const kernels::SlotCache& cache = waiting_.back().cache;
  if (!beside_attention(cache) && waiting_.size() == layers_at_once(cache, kHalf)) branch_off();
}

void ObservedAttention::branch_off() {
  attended_.record(stream_);
  attended_.hold(branch_.get());
  check(kernels_.observe(kernels_, waiting_, false, branch_.get()), "observing attention");
  const std::uint32_t layer = waiting_.back().policy.layer;
  if (layer % kHalf == kHalf - 1) observed_[layer / kHalf % 2].record(branch_.get());
  waiting_.clear();
}

void ObservedAttention::join() {
  if (!waiting_.empty()) branch_off();
  attended_.record(branch_.get());
  attended_.hold(stream_);
}

}  // namespace kvlab
