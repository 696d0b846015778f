// Rotates the queries and keys of an append to cache positions. Memory traffic: every query and
// every key is read and written once. Most of the work is to compute the cache position of each
// older token, which takes one comparison with every other older token. That happens once per
// append.
#include "kernels/evict/cache_positions.hpp"

#include "kernels/device/reduce.cuh"
#include "kernels/device/type_dispatch.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// Rotates a vector to a cache position. Called by a warp.
template <class T>
__device__ void rotate(const CachePositionArgs& args, const T* from, int position_in_cache, T* to) {
  const int half = args.rotated / 2, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int d = lane; d < half; d += kWarpSize) {
    double sine, cosine;
    sincos(static_cast<double>(position_in_cache) * static_cast<double>(args.inv_freq[d]), &sine,
           &cosine);
    const float c = static_cast<float>(cosine) * args.rope_factor,
                s = static_cast<float>(sine) * args.rope_factor;
    const float low = to_float(from[d]), high = to_float(from[d + half]);
    to[d] = from_float<T>(low * c - high * s);
    to[d + half] = from_float<T>(high * c + low * s);
  }
  for (int d = args.rotated + lane; d < args.head_size; d += kWarpSize) to[d] = from[d];
}

/// Uses one warp for each query head of a token.
template <class T>
__global__ void queries_kernel(const CachePositionArgs args, const T* q, T* to) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (row >= args.tokens * args.query_heads) return;
  const int token = row / args.query_heads;
  const int kv_head = row % args.query_heads / (args.query_heads / args.kv_heads);
  const std::int64_t at = std::int64_t{row} * args.head_size;
  rotate(args, q + at, args.older[kv_head] + args.first + token, to + at);
}

/// Uses one warp for each key of a head (blockIdx.y).
template <class T>
__global__ void keys_kernel(const CachePositionKeysArgs args, bool rotates_older) {
  const CachePositionArgs& shape = args.shape;
  const int kv_head = static_cast<int>(blockIdx.y), older = shape.older[kv_head];
  const int i = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (i >= (rotates_older ? older : shape.tokens)) return;
  const int slot = rotates_older ? i : older + shape.first + i;
  int position_in_cache = slot;
  if (rotates_older) {
    const std::uint32_t* const positions = args.positions + std::int64_t{kv_head} * args.slots;
    int count = 0;
    for (int other = static_cast<int>(threadIdx.x) % kWarpSize; other < older; other += kWarpSize)
      count += positions[other] < positions[i] ? 1 : 0;
    position_in_cache = __reduce_add_sync(~0u, count);
    if (args.rotated) position_in_cache += static_cast<int>(args.now - positions[i]) - older;
  } else if (args.rotated) {
    position_in_cache = 0;
  }
  const std::int64_t at = (std::int64_t{kv_head} * args.slots + slot) * shape.head_size;
  rotate(shape, static_cast<const T*>(args.keys) + at, position_in_cache,
         static_cast<T*>(args.to) + at);
}

bool valid(const CachePositionArgs& args) {
  return args.query_heads > 0 && args.kv_heads > 0 && args.query_heads % args.kv_heads == 0 &&
         args.head_size > 0 && args.rotated > 0 && args.rotated % 2 == 0 &&
         args.rotated <= args.head_size && args.inv_freq && args.older && args.first >= 0;
}

unsigned blocks_for(int warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

}  // namespace

cudaError_t rotate_queries_to_cache_positions(const CachePositionArgs& args, const void* q,
                                              void* to, cudaStream_t stream) {
  if (!valid(args) || args.tokens <= 0 || !q || !to) return cudaErrorInvalidValue;
  return with_type(args.type, [&]<class T>(T) {
    queries_kernel<T><<<blocks_for(args.tokens * args.query_heads), kThreads, 0, stream>>>(
        args, static_cast<const T*>(q), static_cast<T*>(to));
    return cudaGetLastError();
  });
}

cudaError_t rotate_keys_to_cache_positions(const CachePositionKeysArgs& args, bool rotates_older,
                                           cudaStream_t stream) {
  if (!valid(args.shape) || (!rotates_older && args.shape.tokens <= 0) || args.slots <= 0 ||
      !args.keys || !args.to || (rotates_older && !args.positions))
    return cudaErrorInvalidValue;
  const dim3 grid(blocks_for(rotates_older ? args.slots : args.shape.tokens),
                  static_cast<unsigned>(args.shape.kv_heads));
  return with_type(args.shape.type, [&]<class T>(T) {
    keys_kernel<T><<<grid, kThreads, 0, stream>>>(args, rotates_older);
    return cudaGetLastError();
  });
}

}  // namespace kvlab::kernels
