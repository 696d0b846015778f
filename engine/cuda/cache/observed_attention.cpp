#include "engine/cuda/cache/observed_attention.hpp"

#include "kernels/linear/linear.hpp"

namespace kvlab {
namespace {

using cuda::check;

constexpr std::size_t kHalf = ObserverBranch::kHalf;

/// Number of layers that are observed together: several if they have few slots, because each branch
/// costs about 1 µs.
std::size_t layers_at_once(const kvlab_cache_view& cache) {
  constexpr std::int64_t kSlots = 1 << 17;
  const std::int64_t slots = std::int64_t{cache.sequences} * cache.kv_heads * cache.max_slots;
  std::size_t layers = kHalf;
  while (layers > 1 && static_cast<std::int64_t>(layers) * slots > kSlots) layers /= 2;
  return layers;
}

/// Whether observation runs at the same time as the next layer's attention. Otherwise it runs at
/// the same time as the matrix products that follow attention. With many sequences, these products
/// occupy all multiprocessors, but attention does not. However, when the next layer's attention
/// runs, the logits have left the L2 cache and are read from memory. So running beside attention
/// pays off only if each key has few logits, that is, if a KV head has few query heads.
bool goes_beside_attention(const kvlab_cache_view& cache) {
  return cache.sequences > kernels::kMaxLinearRows && cache.query_heads <= 2 * cache.kv_heads;
}

}  // namespace

ObservedAttention::ObservedAttention(const kernels::EvictionKernels& kernels,
                                     std::vector<kernels::EvictingAttentionArgs> layers,
                                     const ObserverBranch& branch, cudaStream_t stream)
    : kernels_(kernels),
      layers_(std::move(layers)),
      branch_(branch),
      stream_(stream),
      together_(layers_.empty() ? 1 : layers_at_once(layers_.front().cache)),
      beside_attention_(!layers_.empty() && goes_beside_attention(layers_.front().cache)) {}

void ObservedAttention::attend(std::size_t layer) const {
  if (beside_attention_ && layer > 0) branch_off(layer - 1, layer);
  if (layer >= 2 * kHalf && layer % kHalf == 0) branch_.observed[layer / kHalf % 2].hold(stream_);
  check(kernels_.attend(kernels_, layers_[layer], stream_), "evicting attention");
}

void ObservedAttention::observe(std::size_t layer) const {
  if (!beside_attention_ && (layer + 1) % together_ == 0)
    branch_off(layer + 1 - together_, layer + 1);
}

void ObservedAttention::branch_off(std::size_t first, std::size_t end) const {
  branch_.attended.record(stream_);
  branch_.attended.hold(branch_.stream.get());
  check(kernels_.observe(kernels_, std::span(layers_).subspan(first, end - first), false,
                         branch_.stream.get()),
        "observing attention");
  if (end % kHalf == 0) branch_.observed[(end - 1) / kHalf % 2].record(branch_.stream.get());
}

void ObservedAttention::join() const {
  const std::size_t left = beside_attention_ ? 1 : layers_.size() % together_;
  if (left > 0) branch_off(layers_.size() - left, layers_.size());
  branch_.attended.record(branch_.stream.get());
  branch_.attended.hold(stream_);
}

}  // namespace kvlab
