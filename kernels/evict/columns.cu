// A block for each pair: sums in index order, as on the host, so a thread each.
#include "kernels/evict/columns.hpp"

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch.cuh"
#include "policies/columns/column_sums.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;

/// One pair's new tokens.
template <class T>
class NewTokens {
 public:
  __device__ NewTokens(const ColumnArgs& args, const Pair& pair)
      : args_(args),
        keys_(static_cast<const T*>(args.keys) +
              std::int64_t{pair.sequence} * args.tokens * args.key_row +
              std::int64_t{pair.kv_head} * args.cache.head_size),
        first_(args.cache.first_slot[pair.index] + args.slots[pair.index]) {}

  __device__ auto key(int token) const {
    return [from = keys_ + token * args_.key_row](std::uint32_t d) { return to_float(from[d]); };
  }
  __device__ auto value(int token) const {
    const T* const from =
        static_cast<const T*>(args_.cache.values) + (first_ + token) * args_.cache.head_size;
    return [from](std::uint32_t d) { return to_float(from[d]); };
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
  const ColumnArgs& args_;
  const T* keys_;
  std::int64_t first_;
};

/// Adds the new tokens' unit keys, then turns their keys' norms, in column `c`, into cosines. By
/// the whole block.
template <class T>
__device__ void make_cosines(const ColumnArgs& args, const NewTokens<T>& own, int c,
                             float* unit_keys) {
  __shared__ float length_of_sum;
  const auto size = static_cast<std::uint32_t>(args.cache.head_size);
  const auto direction = [unit_keys](std::uint32_t d) { return unit_keys[d]; };
  for (std::uint32_t d = threadIdx.x; d < size; d += kThreads) {
    float sum = unit_keys[d];
#pragma unroll 8
    for (int token = 0; token < args.tokens; ++token)
      if (const float length = own.column(token, c); length > 0) sum += own.key(token)(d) / length;
    unit_keys[d] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) length_of_sum = sqrtf(sum_of_squares(size, direction));
  __syncthreads();
  for (int token = static_cast<int>(threadIdx.x); token < args.tokens; token += kThreads)
    own.column(token, c) = cosine_from(sum_of_products(size, own.key(token), direction),
                                       own.column(token, c), length_of_sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const __grid_constant__ ColumnArgs args) {
  wait_for_predecessor();
  let_successor_start();
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), args.cache.kv_heads);
  if (args.now != nullptr && args.now[pair.sequence] == kIdle) return;
  const NewTokens<T> own(args, pair);
  const int count = args.columns.count;
  for (int i = static_cast<int>(threadIdx.x); i < args.tokens * count; i += kThreads)
    own.column(i / count, i % count) = own.of_token(args.columns.of[i % count], i / count);
  for (int c = 0; c < count; ++c) {
    if (args.columns.of[c] != BuiltInColumn::key_cosine) continue;
    __syncthreads();
    make_cosines(args, own, c, args.unit_keys + std::int64_t{pair.index} * args.cache.head_size);
  }
}

bool valid(const ColumnArgs& args) {
  const SlotCache& cache = args.cache;
  return cache.sequences > 0 && cache.kv_heads > 0 && cache.head_size > 0 && args.tokens > 0 &&
         args.columns.count > 0 && cache.first_slot && cache.values && args.slots && args.keys &&
         args.to && (!args.columns.has(BuiltInColumn::key_cosine) || args.unit_keys);
}

}  // namespace

cudaError_t make_columns(const ColumnArgs& args, cudaStream_t stream) {
  if (!valid(args)) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(args.cache.sequences * args.cache.kv_heads)),
      .block = dim3(kThreads),
      .stream = stream};
  return with_type(args.cache.type,
                   [&]<class T>(T) { return launch(limits, columns_kernel<T>, where, args); });
}

}  // namespace kvlab::kernels
