// Finds the centres of a prompt's keys and subtracts them. Memory traffic: find_centres reads up to
// 128 keys of each KV head once; subtract_centres reads and writes the new keys once.
#include "kernels/quantized/centre.hpp"

#include "kernels/device/type_dispatch.cuh"

namespace kvlab::kernels {
namespace {

/// Uses one thread block for each KV head and one thread for each channel. Each thread adds the
/// keys in the same order as the CPU code, so that both get the same bits.
template <class T>
__global__ void find_centres_kernel(const kvlab_cache_view cache, std::uint32_t keys,
                                    float* centres) {
  const auto head = static_cast<int>(blockIdx.x), channel = static_cast<int>(threadIdx.x);
  const T* const own =
      static_cast<const T*>(cache.keys) + cache.first_slot[head] * cache.head_size + channel;
  CentreChannel centre;
  for (std::uint32_t i = 0; i < keys; ++i)
    centre.add(to_float(own[static_cast<std::int64_t>(i) * cache.head_size]));
  centres[head * cache.head_size + channel] = centre.mean();
}

/// Uses one thread block for each new token and KV head, and one thread for each channel.
template <class T>
__global__ void subtract_centres_kernel(const kvlab_cache_view cache, std::uint32_t first,
                                        const float* centres) {
  const auto head = static_cast<int>(blockIdx.y), channel = static_cast<int>(threadIdx.x);
  const std::int64_t slot = cache.first_slot[head] + cache.lengths[head] + first + blockIdx.x;
  T& key = static_cast<T*>(cache.keys)[slot * cache.head_size + channel];
  key = from_float<T>(to_float(key) - centres[head * cache.head_size + channel]);
}

}  // namespace

cudaError_t find_centres(const kvlab_cache_view& cache, std::uint32_t keys, float* centres,
                         cudaStream_t stream) {
  return with_type(cache.type, [&]<class T>(T) {
    find_centres_kernel<T>
        <<<static_cast<unsigned>(cache.kv_heads), static_cast<unsigned>(cache.head_size), 0,
           stream>>>(cache, keys, centres);
    return cudaGetLastError();
  });
}

cudaError_t subtract_centres(const kvlab_cache_view& cache, std::uint32_t first,
                             std::uint32_t tokens, const float* centres, cudaStream_t stream) {
  return with_type(cache.type, [&]<class T>(T) {
    subtract_centres_kernel<T>
        <<<dim3(tokens, static_cast<unsigned>(cache.kv_heads)),
           static_cast<unsigned>(cache.head_size), 0, stream>>>(cache, first, centres);
    return cudaGetLastError();
  });
}

}  // namespace kvlab::kernels
