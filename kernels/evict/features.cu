// Computes token features. Each sum is computed by one thread in index order, because the host adds
// in this order. For norms and the cosine there is one thread block per pair; if there is only one
// token (a decode step), all threads first copy its key and value to shared memory. For
// value_out_norm1 there is one thread block for some tokens of a pair.
#include "kernels/evict/features.hpp"

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch.cuh"
#include "kernels/why_not.hpp"
#include "policies/features/feature_sums.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxFeatures <= kThreads / kWarpSize);

/// The value of a pair's new token in a slot.
template <class T>
__device__ const T* value_of(const FeatureArgs& args, int pair, int slot) {
  if (args.values != nullptr)
    return static_cast<const T*>(args.values) + std::int64_t{pair} * args.cache.head_size;
  return static_cast<const T*>(args.cache.values) + row_of(args.cache, pair, slot);
}

/// The number of new tokens of a sequence whose features are computed.
template <bool kOne>
__device__ int count_of(const FeatureArgs& args, int sequence) {
  if (kOne || args.appended == nullptr) return args.tokens;
  return min(args.tokens, static_cast<int>(args.appended[sequence]));
}

/// The new tokens of one pair. If there is only one, it is copied to shared memory [2, dim].
template <class T, bool kOne>
class NewTokens {
 public:
  /// Called by the whole thread block. If it copies to shared memory, it ends with a barrier.
  __device__ NewTokens(const FeatureArgs& args, const Pair& pair, float* staged)
      : args_(args),
        keys_(static_cast<const T*>(args.keys) +
              std::int64_t{pair.sequence} * args.tokens * args.key_row +
              std::int64_t{pair.kv_head} * args.cache.head_size),
        pair_(pair.index),
        slot_(args.slots[pair.index]),
        first_(args.cache.first_slot[pair.index] + slot_),
        count_(count_of<kOne>(args, pair.sequence)),
        staged_(staged) {
    if constexpr (!kOne) return;
    const int size = args.cache.head_size;
    for (int d = static_cast<int>(threadIdx.x); d < size; d += kThreads) {
      staged[d] = to_float(keys_[d]);
      staged[size + d] = to_float(values(0)[d]);
    }
    __syncthreads();
  }

  __device__ auto key(int token) const {
    if constexpr (kOne)
      return [from = staged_](std::uint32_t d) { return from[d]; };
    else
      return [from = keys_ + token * args_.key_row](std::uint32_t d) { return to_float(from[d]); };
  }
  __device__ auto value(int token) const {
    if constexpr (kOne)
      return [from = staged_ + args_.cache.head_size](std::uint32_t d) { return from[d]; };
    else
      return [from = values(token)](std::uint32_t d) { return to_float(from[d]); };
  }
  __device__ int count() const { return count_; }
  __device__ float& feature(int token, int c) const {
    return args_.to[(first_ + token) * args_.count + c];
  }

  /// A token's feature. For key_cosine it is only the key's norm, which make_cosines() replaces.
  __device__ float read_feature(kvlab_feature feature, int token) const {
    const auto size = static_cast<std::uint32_t>(args_.cache.head_size);
    switch (feature) {
      case KVLAB_VALUE_NORM:
        return sqrtf(sum_of_squares(size, value(token)));
      case KVLAB_VALUE_NORM1:
        return sum_of_magnitudes(size, value(token));
      default:
        return sqrtf(sum_of_squares(size, key(token)));
    }
  }

 private:
  __device__ const T* values(int token) const { return value_of<T>(args_, pair_, slot_ + token); }

  const FeatureArgs& args_;
  const T* keys_;
  int pair_, slot_;     // of the first new token; slot_ is relative to the pair's first slot
  std::int64_t first_;  // the same slot, among all slots
  int count_;
  const float* staged_;
};

/// Adds up the new tokens' unit keys, then converts the norms of their keys, in feature `c`, to
/// cosines. Called by the whole thread block, after a barrier. `direction` [dim]: shared memory.
template <class T, bool kOne>
__device__ void make_cosines(const FeatureArgs& args, const NewTokens<T, kOne>& own, int c,
                             float* unit_keys, float* direction) {
  __shared__ float length_of_sum;
  const auto size = static_cast<std::uint32_t>(args.cache.head_size);
  const auto along = [direction](std::uint32_t d) { return direction[d]; };
  for (std::uint32_t d = threadIdx.x; d < size; d += kThreads) {
    float sum = unit_keys[d];
#pragma unroll 8
    for (int token = 0; token < own.count(); ++token)
      if (const float length = own.feature(token, c); length > 0) sum += own.key(token)(d) / length;
    unit_keys[d] = direction[d] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) length_of_sum = sqrtf(sum_of_squares(size, along));
  __syncthreads();
  for (int token = static_cast<int>(threadIdx.x); token < own.count(); token += kThreads)
    own.feature(token, c) = cosine_from(sum_of_products(size, own.key(token), along),
                                        own.feature(token, c), length_of_sum);
}

/// Shared memory: [3, dim].
template <class T, bool kOne>
__global__ void __launch_bounds__(kThreads)
    features_kernel(const __grid_constant__ FeatureArgs args) {
  extern __shared__ float shared[];
  wait_for_predecessor();
  let_successor_start();
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), args.cache.kv_heads);
  if (args.now != nullptr && args.now[pair.sequence] == kIdle) return;
  const NewTokens<T, kOne> own(args, pair, shared);
  const int count = args.count;
  // The features of a single token are computed in parallel. The first lane of a warp computes each
  // of them.
  constexpr int kEach = kOne ? kWarpSize : 1;
  for (int i = static_cast<int>(threadIdx.x); i < own.count() * count * kEach; i += kThreads)
    if (const int at = i / kEach;
        i % kEach == 0 && args.features[at % count] != KVLAB_VALUE_OUT_NORM1)
      own.feature(at / count, at % count) = own.read_feature(args.features[at % count], at / count);
  for (int c = 0; c < count; ++c) {
    if (args.features[c] != KVLAB_KEY_COSINE) continue;
    __syncthreads();
    make_cosines(args, own, c, args.unit_keys + std::int64_t{pair.index} * args.cache.head_size,
                 shared + 2 * args.cache.head_size);
  }
}

constexpr int kOutputs = 128;  // number of outputs that a thread block computes at once
constexpr int kMaxGroup = 16, kTokensTogether = 8;

/// Bytes for the absolute values of outputs, [query head and token, kOutputs + 1]. The padding
/// avoids bank conflicts.
constexpr std::size_t bytes_of_magnitudes(int group, int tokens) {
  return static_cast<std::size_t>(group * tokens) * (kOutputs + 1) * sizeof(float);
}

/// Computes value_out_norm1, feature `c`, for up to kTokens tokens of a pair. One thread computes
/// each output, a sum over the value's elements in index order. Then one thread for each query head
/// and token sums the absolute outputs in order. At the end, one thread for each token sums the
/// query heads in order. Shared memory: values [kTokens, dim], then absolute values.
template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads)
    output_norms_kernel(const __grid_constant__ FeatureArgs args, int c) {
  extern __shared__ float values[];
  wait_for_predecessor();
  let_successor_start();
  const kvlab_cache_view& cache = args.cache;
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  if (args.now != nullptr && args.now[pair.sequence] == kIdle) return;
  const int size = cache.head_size, group = cache.query_heads / cache.kv_heads;
  const int first = static_cast<int>(blockIdx.y) * kTokens,
            count = min(kTokens, count_of<kTokens == 1>(args, pair.sequence) - first);
  if constexpr (kTokens > 1)
    if (count <= 0) return;
  const int slot = args.slots[pair.index] + first;
  float* const magnitudes = values + kTokens * size;
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * size; i += kThreads)
    values[i] = i < count * size
                    ? to_float(value_of<T>(args, pair.index, slot + i / size)[i % size])
                    : 0.0f;

  const T* const weights =
      static_cast<const T*>(args.output) + std::int64_t{pair.kv_head} * group * size;
  const std::int64_t row = std::int64_t{cache.query_heads} * size;
  // The index of the query head and token whose outputs this thread sums.
  const int chain = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int begin = 0; begin < args.hidden; begin += kOutputs) {
    const int outputs = min(kOutputs, args.hidden - begin);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < outputs * group; i += kThreads) {
      const int output = i % outputs, head = i / outputs;
      const T* const weight = weights + (begin + output) * row + head * size;
      float products[kTokens] = {};
      for (int d = 0; d < size; ++d) {
        const float w = to_float(weight[d]);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) products[t] += w * values[t * size + d];
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t)
        magnitudes[(head * kTokens + t) * (kOutputs + 1) + output] = fabsf(products[t]);
    }
    __syncthreads();
    for (int output = 0; chain < group * kTokens && output < outputs; ++output)
      sum += magnitudes[chain * (kOutputs + 1) + output];
  }
  __syncthreads();
  if (chain < group * kTokens) magnitudes[chain] = sum;
  __syncthreads();
  if (chain >= count) return;
  float all = 0;
  for (int head = 0; head < group; ++head) all += magnitudes[head * kTokens + chain];
  args.to[(cache.first_slot[pair.index] + slot + chain) * args.count + c] = all;
}

template <class T, int kTokens>
cudaError_t launch_output_norms(const DeviceLimits& limits, const FeatureArgs& args, int c,
                                cudaStream_t stream) {
  const kvlab_cache_view& cache = args.cache;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(cache.sequences * cache.kv_heads),
                   static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens)),
      .block = dim3(kThreads),
      .shared_bytes = kTokens * static_cast<std::size_t>(cache.head_size) * sizeof(float) +
                      bytes_of_magnitudes(cache.query_heads / cache.kv_heads, kTokens),
      .stream = stream};
  return launch(limits, output_norms_kernel<T, kTokens>, where, args, c);
}

}  // namespace

cudaError_t make_features(const FeatureArgs& args, cudaStream_t stream) {
  if (!why_not(args).empty()) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(args.cache.sequences * args.cache.kv_heads)),
      .block = dim3(kThreads),
      .shared_bytes = 3 * static_cast<std::size_t>(args.cache.head_size) * sizeof(float),
      .stream = stream};
  const bool one = args.tokens == 1 && args.appended == nullptr;
  // Wide groups get half as many tokens, so that both variants store the same number of absolute
  // values.
  const bool wide = 2 * args.cache.query_heads > kMaxGroup * args.cache.kv_heads;
  return with_type(args.cache.type, [&]<class T>(T) {
    for (int c = 0; c < args.count; ++c) {
      if (args.features[c] != KVLAB_VALUE_OUT_NORM1) continue;
      const cudaError_t error =
          one    ? launch_output_norms<T, 1>(limits, args, c, stream)
          : wide ? launch_output_norms<T, kTokensTogether / 2>(limits, args, c, stream)
                 : launch_output_norms<T, kTokensTogether>(limits, args, c, stream);
      if (error || args.count == 1) return error;
    }
    return one ? launch(limits, features_kernel<T, true>, where, args)
               : launch(limits, features_kernel<T, false>, where, args);
  });
}

}  // namespace kvlab::kernels
