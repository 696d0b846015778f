#include "kernels/evict/observing_attention.hpp"

#include "kernels/decode/pair_row.cuh"
#include "kernels/device/eviction_order.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/quantized/tier_attention.hpp"
#include "kernels/quantized/tiers.hpp"

namespace kvlab::kernels {
namespace {

int group_of(const kvlab_cache_view& cache) {
  if (cache.kv_heads < 1 || cache.query_heads % cache.kv_heads != 0) return 0;
  return cache.query_heads / cache.kv_heads;
}

/// Fills in the arguments of the attention that the cache determines. Callers add the others before
/// a launch; pair_attention() refuses null pointers.
PairAttention pairs_of(const kvlab_cache_view& cache) {
  const bool counts = cache.sequences > 0 && cache.sequences <= kMaxPairs && cache.kv_heads > 0 &&
                      cache.kv_heads <= kMaxPairs / cache.sequences;
  PairAttention pairs{};
  pairs.type = cache.type;
  pairs.group = group_of(cache);
  pairs.head_size = cache.head_size;
  pairs.softmax_scale = cache.softmax_scale;
  pairs.table.pairs = counts ? cache.sequences * cache.kv_heads : 0;
  pairs.table.kv_heads = cache.kv_heads;
  pairs.table.max_slots = cache.max_slots;
  pairs.table.lengths = cache.lengths;
  pairs.table.next_slots = cache.next_slots;
  pairs.table.first_slot = cache.first_slot;
  pairs.keys = cache.keys;
  pairs.values = cache.values;
  return pairs;
}

int chunks_of(int max_slots) {
  constexpr int slots = kObserveThreads * kObservedSlots;
  return (max_slots + slots - 1) / slots;
}

/// Byte offsets of the arrays that follow the attention's part of the workspace.
struct Layout {
  std::size_t logits, softmax, gone, candidates, firsts, end;

  Layout(const PairAttention& pairs, bool quantized_cache)
      : logits(((quantized_cache ? tier_attention_workspace(pairs) : attention_bytes(pairs)) + 15) /
               16 * 16) {
    const auto count = static_cast<std::size_t>(pairs.table.pairs);
    softmax = logits +
              count * static_cast<std::size_t>(logits_stride(pairs.group)) *
                  static_cast<std::size_t>(row_slots(pairs.table.max_slots)) * sizeof(float) +
              kL2Line;
    candidates = softmax + count * kMaxGroup * sizeof(float2);
    firsts = candidates + count * static_cast<std::size_t>(chunks_of(pairs.table.max_slots)) *
                              (quantized_cache ? kMaxDeviceTiers : 1) * sizeof(EvictionCandidate);
    gone = firsts + (quantized_cache ? count * kMaxDeviceTiers * sizeof(EvictionCandidate) : 0);
    end = gone + count * sizeof(std::uint32_t);
  }

 private:
  /// The bytes of the attention's workspace: the maximum over original positions and cache
  /// positions. Cache positions with rotated keys need no more than original positions.
  static std::size_t attention_bytes(PairAttention pairs) {
    const std::uint32_t any = 0;
    pairs.ages = nullptr;
    pairs.rules = nullptr;
    const std::size_t original = pair_attention_workspace(pairs);
    pairs.ages = &any;
    return std::max(original, pair_attention_workspace(pairs));
  }
};

bool complete(const EvictingAttentionArgs& args) {
  const kvlab_cache_view& cache = args.cache;
  if (cache.next_slots == nullptr || cache.first_slot == nullptr || cache.positions == nullptr ||
      args.now == nullptr)
    return false;
  return args.numbering == KVLAB_ORIGINAL_POSITIONS ||
         ((args.numbering == KVLAB_CACHE_POSITIONS_ROTATED ? args.policy.rules != nullptr
                                                           : cache.ages != nullptr) &&
          args.inv_freq != nullptr && args.rotated == cache.head_size);
}

/// The logits begin at a line of the L2 cache, so that these lines contain only logits and can be
/// discarded.
float* logits_from(std::byte* begin) {
  const auto at = reinterpret_cast<std::uintptr_t>(begin);
  return reinterpret_cast<float*>(begin + (kL2Line - at % kL2Line) % kL2Line);
}

/// The plan of the observing launch: the arrays in which the attention stores its results, and the
/// arrays of the launch itself.
ObservePlan plan_of(const EvictionKernels& policy, const EvictingAttentionArgs& args) {
  const bool observes = policy.needs != Needs::nothing,
             cache_positions = args.numbering == KVLAB_CACHE_POSITIONS;
  const PairAttention pairs = pairs_of(args.cache);
  const Layout at(pairs, args.quantized_cache != nullptr);
  auto* const bytes = static_cast<std::byte*>(args.workspace);
  ObservePlan plan{
      .args = args,
      .table = pairs.table,
      .rows = {.logits = observes ? logits_from(bytes + at.logits) : nullptr,
               .softmax = observes ? reinterpret_cast<float2*>(bytes + at.softmax) : nullptr,
               .gone =
                   cache_positions ? reinterpret_cast<std::uint32_t*>(bytes + at.gone) : nullptr},
      .row_slots = row_slots(args.cache.max_slots),
      .group = pairs.group,
      .cache_positions = cache_positions,
      .chunks = chunks_of(args.cache.max_slots),
      .candidates = reinterpret_cast<EvictionCandidate*>(bytes + at.candidates),
      .observed = static_cast<Signals*>(args.workspace)->observed,
      .choice = {args.quantized_cache, reinterpret_cast<EvictionCandidate*>(bytes + at.firsts)}};
  plan.table.now = args.now;
  return plan;
}

constexpr int kNumberThreads = 256;

/// Uses one thread for each slot of a pair (blockIdx.y).
__global__ void __launch_bounds__(kNumberThreads) number_slots(kvlab_cache_view cache) {
  wait_for_predecessor();
  let_successor_start();
  const int slot = static_cast<int>(blockIdx.x * kNumberThreads + threadIdx.x);
  const int length = cache.lengths[blockIdx.y];
  if (slot >= length) return;
  const std::int64_t first = cache.first_slot[blockIdx.y];
  const std::uint32_t own = cache.positions[first + slot];
  std::uint32_t older = 0;
  for (int i = 0; i < length; ++i) older += cache.positions[first + i] < own ? 1 : 0;
  cache.ages[first + slot] = older;
}

bool is_supported(const EvictionKernels& policy, const EvictingAttentionArgs& args) {
  return args.workspace != nullptr && complete(policy, args) && complete(args) &&
         is_pair_attention(pairs_of(args.cache), args.cache.pages);
}

cudaError_t attend(const EvictionKernels& policy, const EvictingAttentionArgs& args,
                   cudaStream_t stream) {
  if (!is_supported(policy, args)) return cudaErrorInvalidValue;
  PairAttention pairs = pairs_of(args.cache);
  pairs.table.now = args.now;
  pairs.q = args.q;
  pairs.out = args.out;
  pairs.lse = args.lse;
  pairs.settled = args.settled != 0;
  pairs.sinks = args.sinks;
  pairs.rows = plan_of(policy, args).rows;
  pairs.workspace = args.workspace;
  if (args.quantized_cache != nullptr)
    return args.numbering == KVLAB_ORIGINAL_POSITIONS
               ? tier_attention(pairs, *args.quantized_cache, stream)
               : cudaErrorInvalidValue;
  if (args.numbering != KVLAB_ORIGINAL_POSITIONS) {
    pairs.inv_freq = args.inv_freq;
    if (args.numbering == KVLAB_CACHE_POSITIONS_ROTATED) {
      pairs.rules = args.policy.rules;
    } else {
      pairs.ages = args.cache.ages;
      pairs.softmax_scale *= args.rope_factor * args.rope_factor;
    }
  }
  return pair_attention(pairs, args.cache.pages, stream);
}

/// Whether one launch can observe both layers. Both must need the same number of thread blocks.
bool go_together(const ObservePlan& one, const ObservePlan& other) {
  return one.table.pairs == other.table.pairs && one.chunks == other.chunks;
}

cudaError_t observe(const EvictionKernels& policy, std::span<const EvictingAttentionArgs> layers,
                    bool next, cudaStream_t stream) {
  if (layers.empty() || layers.size() > kMaxObservedLayers) return cudaErrorInvalidValue;
  ObservePlans plans{};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!is_supported(policy, layers[i])) return cudaErrorInvalidValue;
    plans.layers[i] = plan_of(policy, layers[i]);
    if (!go_together(plans.layers[0], plans.layers[i])) return cudaErrorInvalidValue;
  }
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  if (const cudaError_t error =
          cudaFuncSetAttribute(policy.observe_pairs, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared))
    return error;  // The setting equals that of the attention, because a multiprocessor only runs
                   // blocks of one configuration at a time.
  const ObservePlan& first = plans.layers[0];
  const dim3 blocks(static_cast<unsigned>(first.chunks), static_cast<unsigned>(first.table.pairs),
                    static_cast<unsigned>(layers.size()));
  void* parameters[] = {&plans};
  if (!next) limits.early_start = false;  // the kernel cannot do any work before the attention ends
  cudaError_t error =
      launch(limits, policy.observe_pairs, {blocks, kObserveThreads, 0, stream}, parameters);
  for (std::size_t i = 0; i < layers.size() && error == cudaSuccess; ++i)
    if (plans.layers[i].choice.in_use())
      error = demote_pairs(layers[i], plans.layers[i].choice.firsts, stream);
  return error;
}

std::size_t observing_workspace(const kvlab_cache_view& cache, bool quantized_cache) {
  const PairAttention pairs = pairs_of(cache);
  if (!is_pair_attention(pairs, cache.pages)) return 0;
  const std::size_t attention = pair_attention_workspace(pairs, cache.pages);
  if (attention == kNoDevice || (attention == 0 && !quantized_cache)) return attention;
  return Layout(pairs, quantized_cache).end;
}

}  // namespace

cudaError_t fill_ages(const kvlab_cache_view& cache, cudaStream_t stream) {
  const PairTable table = pairs_of(cache).table;
  if (table.pairs < 1 || cache.max_slots < 1 || cache.ages == nullptr ||
      cache.positions == nullptr || cache.lengths == nullptr || cache.first_slot == nullptr)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const dim3 blocks(static_cast<unsigned>((cache.max_slots + kNumberThreads - 1) / kNumberThreads),
                    static_cast<unsigned>(table.pairs));
  return launch(limits, number_slots, {blocks, kNumberThreads, 0, stream}, cache);
}

std::string why_not_attention(const kvlab_cache_view& cache, kvlab_numbering numbering,
                              const DeviceLimits& limits) {
  PairAttention pairs = pairs_of(cache);
  const std::uint32_t age = 0;
  const kvlab_rule rule{};
  if (numbering == KVLAB_CACHE_POSITIONS) pairs.ages = &age;
  if (numbering == KVLAB_CACHE_POSITIONS_ROTATED) pairs.rules = &rule;
  return is_pair_attention(pairs, {}) ? why_not_pair_attention(pairs, limits) : "";
}

EvictionKernels observing_kernels(const DevicePolicy& policy) {
  return {policy, observing_workspace, attend, observe};
}

}  // namespace kvlab::kernels
