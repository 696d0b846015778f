// Plain attention over the live slots of each pair. It is the reference in tests of the fast
// kernel, and the fallback where the fast kernel does not run. Memory traffic: keys and values once
// per KV head, and 12 bytes per slot and query head for logits and probabilities, which are stored
// in the workspace.
#include "kernels/evict/plain_eviction.cuh"

#include "kernels/device/pair.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/quantized/quantize.cuh"
#include "kernels/quantized/tiers.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kSlotsPerBlock = 64;
constexpr int kMaxGroup = 16;

/// Number of the pair's live tokens that are older than `position`. Called by a whole warp.
__device__ int tokens_before(const std::uint32_t* positions, int live, std::uint32_t position) {
  int count = 0;
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < live; i += kWarpSize)
    count += positions[i] < position ? 1 : 0;
  return __reduce_add_sync(~0u, count);
}

/// q . k for one pair of dimensions, with k rotated by `angle`. Rotating only k is enough, because
/// only the distance between q and k matters.
__device__ float rotated_part(float q_low, float q_high, float k_low, float k_high, double angle) {
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  const float c = static_cast<float>(cosine), s = static_cast<float>(sine);
  return q_low * (k_low * c - k_high * s) + q_high * (k_high * c + k_low * s);
}

/// Uses one warp for each slot. Grid: (slots / kSlotsPerBlock, pairs).
template <class T>
__global__ void logits_kernel(const EvictingAttentionArgs args, PlainRows rows) {
  const kvlab_cache_view& cache = args.cache;
  const Pair pair = pair_of(static_cast<int>(blockIdx.y), cache.kv_heads);
  if (args.now[pair.sequence] == kIdle) return;
  const int live = live_slots(cache, pair);
  const int group = cache.query_heads / cache.kv_heads, dim = cache.head_size;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t first = cache.first_slot[pair.index];
  const std::uint32_t* const positions = cache.positions + first;
  const T* const q = static_cast<const T*>(args.q) + std::int64_t{pair.index} * group * dim;
  const int half = args.rotated / 2;
  const bool cache_positions = args.numbering != KVLAB_ORIGINAL_POSITIONS;
  const float factor =
      args.numbering == KVLAB_CACHE_POSITIONS_ROTATED ? 1 : args.rope_factor * args.rope_factor;

  for (int i = warp; i < kSlotsPerBlock; i += kWarps) {
    const int slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock + i;
    if (slot >= live) return;
    const T* const key = static_cast<const T*>(cache.keys) + (first + slot) * dim;
    // The query is at the youngest cache position. If keys and query are already rotated to their
    // original positions, the key only has to be rotated by the number of evicted tokens between
    // the two.
    int distance =
        cache_positions ? tokens_before(positions, live, positions[slot]) - (live - 1) : 0;
    if (args.numbering == KVLAB_CACHE_POSITIONS_ROTATED)
      distance += static_cast<int>(args.now[pair.sequence] - positions[slot]);
    for (int head = 0; head < group; ++head) {
      const T* const query = q + head * dim;
      float plain = 0, rotated = 0;
      for (int d = lane; d < dim; d += kWarpSize) {
        if (cache_positions && d < args.rotated) {
          if (d >= half) continue;
          rotated +=
              rotated_part(to_float(query[d]), to_float(query[d + half]), to_float(key[d]),
                           to_float(key[d + half]),
                           static_cast<double>(distance) * static_cast<double>(args.inv_freq[d]));
        } else {
          plain += to_float(query[d]) * to_float(key[d]);
        }
      }
      const float sum = warp_sum(plain) + warp_sum(rotated) * factor;
      if (lane == 0)
        rows.p[(std::int64_t{pair.index} * group + head) * cache.max_slots + slot] =
            sum * cache.softmax_scale;
    }
  }
}

/// Like logits_kernel(), for tokens on tiers. Quantized keys are multiplied with the queries after
/// the Hadamard rotation of both.
template <class T>
__global__ void quantized_logits_kernel(const EvictingAttentionArgs args,
                                        const QuantizedCache quantized_cache, PlainRows rows) {
  extern __shared__ float rotated[];  // [head of the group, dim]
  const kvlab_cache_view& cache = args.cache;
  const Pair pair = pair_of(static_cast<int>(blockIdx.y), cache.kv_heads);
  if (args.now[pair.sequence] == kIdle) return;
  const int live = live_slots(cache, pair), dim = cache.head_size, blocks = dim / kWarpSize;
  const int group = cache.query_heads / cache.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = lane_id();
  const std::int64_t first = cache.first_slot[pair.index];
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[pair.index];
  const T* const q = static_cast<const T*>(args.q) + std::int64_t{pair.index} * group * dim;
  for (int i = warp * kWarpSize; i < group * dim; i += kThreads)
    rotated[i + lane] = hadamard_rotate_block(to_float(q[i + lane]));
  __syncthreads();
  for (int i = warp; i < kSlotsPerBlock; i += kWarps) {
    const int slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock + i;
    if (slot >= live) return;
    const std::uint32_t row_index = quantized_cache.row_of_slot[first + slot];
    const DeviceTier& tier = tier_plan.tier[tier_of(tier_plan, row_index)];
    QuantizedRow key;
    load_part<T>(
        key, part_of(quantized_cache.bytes, tier, row_index - tier.first_row, true, dim, sizeof(T)),
        tier.format, true, blocks);
    const bool exact = tier.format.exact();
    for (int head = 0; head < group; ++head) {
      float sum = 0;
      for (int b = 0; b < blocks; ++b) {
        const int at = head * dim + b * kWarpSize + lane;
        sum += key.y[b] * (exact ? to_float(q[at]) : rotated[at]);
      }
      sum = warp_sum(sum) / static_cast<float>(exact ? 1 : kWarpSize);
      if (lane == 0)
        rows.p[(std::int64_t{pair.index} * group + head) * cache.max_slots + slot] =
            sum * cache.softmax_scale;
    }
  }
}

/// Like weighted_values(), for tokens on tiers.
template <class T>
__device__ void weighted_quantized(const float* p, const QuantizedCache& quantized_cache,
                                   const DeviceTierPlan& tier_plan,
                                   const std::uint32_t* row_of_slot, int live, int dim,
                                   float* shared, T* out) {
  const int parts = kThreads / dim, part = static_cast<int>(threadIdx.x) / dim,
            d = static_cast<int>(threadIdx.x) % dim;
  float sums[2] = {};  // [0]: sum over exact tokens; [1]: sum over quantized tokens
  for (int slot = part; part < parts && slot < live; slot += parts) {
    const DeviceTier& tier = tier_plan.tier[tier_of(tier_plan, row_of_slot[slot])];
    const DeviceFormat format = tier.format;
    const RowPart value = part_of(quantized_cache.bytes, tier, row_of_slot[slot] - tier.first_row,
                                  false, dim, sizeof(T));
    if (format.exact())
      sums[0] += p[slot] * to_float(reinterpret_cast<const T*>(value.data)[d]);
    else
      sums[1] +=
          p[slot] * dequantize(format.floating,
                               load_quantized(value, false, format.value_bits, d, dim / kWarpSize),
                               load_metadata(value.metadata, format.floating, d / kWarpSize));
  }
  for (float& sum : sums) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (int other = 1; part == 0 && other < parts; ++other) sum += shared[other * dim + d];
    __syncthreads();
  }
  if (part == 0) out[d] = from_float<T>(sums[0] + hadamard_rotate_block(sums[1]) / kWarpSize);
}

/// Computes `out` [dim], the sum of the values weighted with the probabilities `p` of a row. Thread
/// d of each group of `dim` threads sums dimension d over the group's share of the slots.
template <class T>
__device__ void weighted_values(const float* p, const T* values, int live, int dim, float* shared,
                                T* out) {
  const int parts = kThreads / dim, part = static_cast<int>(threadIdx.x) / dim,
            d = static_cast<int>(threadIdx.x) % dim;
  float sum = 0;
  if (part < parts)
    for (int slot = part; slot < live; slot += parts)
      sum += p[slot] * to_float(values[std::int64_t{slot} * dim + d]);
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (part != 0) return;
  for (int other = 1; other < parts; ++other) sum += shared[other * dim + d];
  out[d] = from_float<T>(sum);
}

/// Uses one thread block for each query head of each sequence.
template <class T>
__global__ void softmax_kernel(const EvictingAttentionArgs args,
                               const QuantizedCache quantized_cache, PlainRows rows) {
  __shared__ float warp_scratch[kWarps], sum_scratch[kWarps], thread_scratch[kThreads];
  const kvlab_cache_view& cache = args.cache;
  const int group = cache.query_heads / cache.kv_heads, row = static_cast<int>(blockIdx.x);
  const Pair pair = pair_of(row / group, cache.kv_heads);
  if (args.now[pair.sequence] == kIdle) return;
  const int live = live_slots(cache, pair), dim = cache.head_size;
  float* const p = rows.p + std::int64_t{row} * cache.max_slots;

  float largest = -INFINITY;
  for (int slot = static_cast<int>(threadIdx.x); slot < live; slot += kThreads)
    largest = fmaxf(largest, p[slot]);
  largest = block_max(largest, warp_scratch);
  const float sink = args.sinks ? args.sinks[row % cache.query_heads] : -INFINITY,
              max_logit = fmaxf(largest, sink);
  float sum = 0;
  for (int slot = static_cast<int>(threadIdx.x); slot < live; slot += kThreads)
    sum += p[slot] = expf(p[slot] - max_logit);
  sum = block_sum(sum, sum_scratch) + expf(sink - max_logit);
  for (int slot = static_cast<int>(threadIdx.x); slot < live; slot += kThreads) p[slot] /= sum;
  __syncthreads();
  const std::int64_t first = cache.first_slot[pair.index];
  T* const out = static_cast<T*>(args.out) + std::int64_t{row} * dim;
  if (quantized_cache.tier_plans != nullptr)
    weighted_quantized(p, quantized_cache, quantized_cache.tier_plans[pair.index],
                       quantized_cache.row_of_slot + first, live, dim, thread_scratch, out);
  else
    weighted_values(p, static_cast<const T*>(cache.values) + first * dim, live, dim, thread_scratch,
                    out);
  if (threadIdx.x != 0) return;
  rows.largest[row] = expf(largest - max_logit) / sum;
  if (args.lse) args.lse[row] = max_logit + logf(sum);
}

bool valid(const EvictingAttentionArgs& args) {
  const kvlab_cache_view& cache = args.cache;
  const bool cache_positions = args.numbering != KVLAB_ORIGINAL_POSITIONS;
  return cache.sequences > 0 && cache.kv_heads > 0 && cache.query_heads > 0 &&
         cache.query_heads % cache.kv_heads == 0 &&
         cache.query_heads / cache.kv_heads <= kMaxGroup && is_head_size(cache.head_size) &&
         cache.max_slots > 0 && cache.first_slot && cache.keys && cache.values &&
         !cache.pages.blocks && cache.positions && cache.lengths && cache.next_slots &&
         args.policy.rules && args.now && args.q && args.out && args.workspace &&
         !(cache_positions && args.quantized_cache) &&
         (!cache_positions || (args.inv_freq && args.rotated > 0 && args.rotated % 2 == 0 &&
                               args.rotated <= cache.head_size));
}

std::size_t pairs_of(const kvlab_cache_view& cache) {
  return static_cast<std::size_t>(cache.sequences) * static_cast<std::size_t>(cache.kv_heads);
}
std::size_t rows_of(const kvlab_cache_view& cache) {
  return static_cast<std::size_t>(cache.sequences) * static_cast<std::size_t>(cache.query_heads);
}

PlainRows plain_rows(const EvictingAttentionArgs& args) {
  auto* const firsts = static_cast<EvictionCandidate*>(args.workspace);
  auto* const p = reinterpret_cast<float*>(firsts + pairs_of(args.cache) * kMaxDeviceTiers);
  return {.p = p,
          .largest = p + rows_of(args.cache) * static_cast<std::size_t>(args.cache.max_slots),
          .choice = {args.quantized_cache, firsts}};
}

/// Always includes memory for the first victim of each tier.
std::size_t plain_workspace(const kvlab_cache_view& cache, bool /*quantized*/) {
  return pairs_of(cache) * kMaxDeviceTiers * sizeof(EvictionCandidate) +
         rows_of(cache) * (static_cast<std::size_t>(cache.max_slots) + 1) * sizeof(float);
}

/// Launches two kernels: one computes the logits of every live slot, the other the softmax and the
/// output of each row.
cudaError_t attend(const EvictionKernels& policy, const EvictingAttentionArgs& args,
                   cudaStream_t stream) {
  if (!complete(policy, args) || !valid(args)) return cudaErrorInvalidValue;
  const kvlab_cache_view& cache = args.cache;
  const PlainRows rows = plain_rows(args);
  const dim3 tiles(static_cast<unsigned>((cache.max_slots + kSlotsPerBlock - 1) / kSlotsPerBlock),
                   static_cast<unsigned>(cache.sequences * cache.kv_heads));
  const QuantizedCache quantized_cache =
      args.quantized_cache ? *args.quantized_cache : QuantizedCache{};
  const std::size_t queries = static_cast<std::size_t>(cache.query_heads / cache.kv_heads) *
                              static_cast<std::size_t>(cache.head_size) * sizeof(float);
  return with_type(cache.type, [&]<class T>(T) {
    if (args.quantized_cache)
      quantized_logits_kernel<T><<<tiles, kThreads, queries, stream>>>(args, quantized_cache, rows);
    else
      logits_kernel<T><<<tiles, kThreads, 0, stream>>>(args, rows);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    softmax_kernel<T>
        <<<static_cast<unsigned>(cache.sequences * cache.query_heads), kThreads, 0, stream>>>(
            args, quantized_cache, rows);
    return cudaGetLastError();
  });
}

/// One launch per layer.
cudaError_t evict(const EvictionKernels& policy, std::span<const EvictingAttentionArgs> layers,
                  bool /*next*/, cudaStream_t stream) {
  cudaError_t error = layers.empty() ? cudaErrorInvalidValue : cudaSuccess;
  for (EvictingAttentionArgs args : layers) {
    if (!valid(args) || !complete(policy, args)) return cudaErrorInvalidValue;
    const auto pairs = static_cast<unsigned>(args.cache.sequences * args.cache.kv_heads);
    PlainRows rows = plain_rows(args);
    void* parameters[] = {&args, &rows};
    error = cudaLaunchKernel(policy.evict, dim3(pairs), dim3(kEvictThreads), parameters, 0, stream);
    if (error == cudaSuccess && rows.choice.in_use())
      error = demote_pairs(args, rows.choice.firsts, stream);
    if (error != cudaSuccess) return error;
  }
  return error;
}

}  // namespace

EvictionKernels plain_kernels(const DevicePolicy& policy) {
  return {policy, plain_workspace, attend, evict};
}

}  // namespace kvlab::kernels
