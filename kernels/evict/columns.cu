// A block for each pair: sums in index order, as on the host, so a thread for each. Where there is
// but one token, in a decode step, its key and value are first put into shared memory by all
// threads at once.
#include "kernels/evict/columns.hpp"

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch.cuh"
#include "policies/columns/column_sums.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxColumns <= kThreads / kWarpSize);

/// One pair's new tokens; of one alone, staged in shared memory [2, dim].
template <class T, bool kOne>
class NewTokens {
 public:
  /// By the whole block; ends with a barrier where it stages.
  __device__ NewTokens(const ColumnArgs& args, const Pair& pair, float* staged)
      : args_(args),
        keys_(static_cast<const T*>(args.keys) +
              std::int64_t{pair.sequence} * args.tokens * args.key_row +
              std::int64_t{pair.kv_head} * args.cache.head_size),
        first_(args.cache.first_slot[pair.index] + args.slots[pair.index]),
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
  __device__ float& column(int token, int c) const {
    return args_.to[(first_ + token) * args_.columns.count + c];
  }

  /// What a token brings; of key_cosine first the key's norm.
  __device__ float of_token(BuiltInColumn column, int token) const {
    const auto size = static_cast<std::uint32_t>(args_.cache.head_size);
    switch (column) {
      case BuiltInColumn::value_norm:
        return sqrtf(sum_of_squares(size, value(token)));
      case BuiltInColumn::value_norm1:
        return sum_of_magnitudes(size, value(token));
      default:
        return sqrtf(sum_of_squares(size, key(token)));
    }
  }

 private:
  __device__ const T* values(int token) const {
    return static_cast<const T*>(args_.cache.values) + (first_ + token) * args_.cache.head_size;
  }

  const ColumnArgs& args_;
  const T* keys_;
  std::int64_t first_;
  const float* staged_;
};

/// Adds the new tokens' unit keys, then turns their keys' norms, in column `c`, into cosines. By
/// the whole block, behind a barrier. `direction` [dim]: shared memory.
template <class T, bool kOne>
__device__ void make_cosines(const ColumnArgs& args, const NewTokens<T, kOne>& own, int c,
                             float* unit_keys, float* direction) {
  __shared__ float length_of_sum;
  const auto size = static_cast<std::uint32_t>(args.cache.head_size);
  const auto along = [direction](std::uint32_t d) { return direction[d]; };
  for (std::uint32_t d = threadIdx.x; d < size; d += kThreads) {
    float sum = unit_keys[d];
#pragma unroll 8
    for (int token = 0; token < args.tokens; ++token)
      if (const float length = own.column(token, c); length > 0) sum += own.key(token)(d) / length;
    unit_keys[d] = direction[d] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) length_of_sum = sqrtf(sum_of_squares(size, along));
  __syncthreads();
  for (int token = static_cast<int>(threadIdx.x); token < args.tokens; token += kThreads)
    own.column(token, c) = cosine_from(sum_of_products(size, own.key(token), along),
                                       own.column(token, c), length_of_sum);
}

/// Shared memory: [3, dim].
template <class T, bool kOne>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const __grid_constant__ ColumnArgs args) {
  extern __shared__ float shared[];
  wait_for_predecessor();
  let_successor_start();
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), args.cache.kv_heads);
  if (args.now != nullptr && args.now[pair.sequence] == kIdle) return;
  const NewTokens<T, kOne> own(args, pair, shared);
  const int count = args.columns.count;
  constexpr int kEach = kOne ? kWarpSize : 1;  // columns of one token side by side: a warp each
  for (int i = static_cast<int>(threadIdx.x); i < args.tokens * count * kEach; i += kThreads)
    if (const int at = i / kEach; i % kEach == 0)
      own.column(at / count, at % count) = own.of_token(args.columns.of[at % count], at / count);
  for (int c = 0; c < count; ++c) {
    if (args.columns.of[c] != BuiltInColumn::key_cosine) continue;
    __syncthreads();
    make_cosines(args, own, c, args.unit_keys + std::int64_t{pair.index} * args.cache.head_size,
                 shared + 2 * args.cache.head_size);
  }
}

bool valid(const ColumnArgs& args) {
  constexpr int kMostHeadSize = 1024;
  const SlotCache& cache = args.cache;
  return cache.sequences > 0 && cache.kv_heads > 0 && cache.head_size > 0 &&
         cache.head_size <= kMostHeadSize && args.tokens > 0 && args.columns.count > 0 &&
         cache.first_slot && cache.values && args.slots && args.keys && args.to &&
         (!args.columns.has(BuiltInColumn::key_cosine) || args.unit_keys);
}

}  // namespace

cudaError_t make_columns(const ColumnArgs& args, cudaStream_t stream) {
  if (!valid(args)) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(args.cache.sequences * args.cache.kv_heads)),
      .block = dim3(kThreads),
      .shared_bytes = 3 * static_cast<std::size_t>(args.cache.head_size) * sizeof(float),
      .stream = stream};
  return with_type(args.cache.type, [&]<class T>(T) {
    return args.tokens == 1 ? launch(limits, columns_kernel<T, true>, where, args)
                            : launch(limits, columns_kernel<T, false>, where, args);
  });
}

}  // namespace kvlab::kernels
