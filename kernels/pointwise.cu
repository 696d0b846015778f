// Element-wise operations. Each element is read and written once, so memory bandwidth limits the
// kernels if there are many tokens, and launch latency if there are few. The comment at each kernel
// gives the bytes that it reads and writes per token.
#include "kernels/pointwise.hpp"

#include "kernels/device/activation.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/row_norm.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch.cuh"
#include "kernels/rope.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;

__device__ inline std::size_t global_thread() {
  return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

/// A two-dimensional grid: blockIdx.x is the token, and each thread of the blocks (blockIdx.x, y)
/// handles eight elements of it.
Launch by_eight(int tokens, int width, cudaStream_t stream) {
  const int chunks = width / 8;
  return {.grid = dim3(static_cast<unsigned>(tokens),
                       static_cast<unsigned>((chunks + kThreads - 1) / kThreads)),
          .block = dim3(kThreads),
          .stream = stream};
}
__device__ inline int chunk_of_thread() {
  return static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
}

/// Bytes: hidden * (bytes of T + 4) per token.
template <class T>
__global__ void embed_kernel(const T* table, int hidden, float scale, const std::int32_t* ids,
                             float* x) {
  let_successor_start();
  wait_for_predecessor();
  const int at = chunk_of_thread() * 8;
  if (at >= hidden) return;
  const std::int32_t id = ids[blockIdx.x];
  float value[8];
  if (id >= 0) {
    load_eight(table + static_cast<std::size_t>(id) * hidden + at, value);
#pragma unroll
    for (float& v : value) v *= scale;
  } else {
#pragma unroll
    for (float& v : value) v = nanf("");
  }
  store_eight(value, x + std::size_t{blockIdx.x} * hidden + at);
}

/// Bytes: hidden * 4 + 4 per token. Uses one thread block for each token.
__global__ void squared_norms_kernel(const float* x, int hidden, float* norms) {
  __shared__ float sums[kThreads / kWarpSize];
  let_successor_start();
  wait_for_predecessor();
  const float sum = sum_of_squares<kThreads>(x + std::size_t{blockIdx.x} * hidden, hidden, sums);
  if (threadIdx.x == 0) norms[blockIdx.x] = sum;
}

/// Bytes: hidden * (4 + bytes of T) per token; the second read of x comes from the cache. Uses one
/// thread block for each token.
template <class T>
__global__ void rms_norm_kernel(const float* x, const Norm norm, int hidden, T* y) {
  __shared__ float sums[kThreads / kWarpSize];
  let_successor_start();
  wait_for_predecessor();
  const float* const row = x + std::size_t{blockIdx.x} * hidden;
  const bool normed = norm.gamma != nullptr;
  const float scale = normed ? scale_of<kThreads>(row, norm, hidden, sums) : 1;
  for (int at = static_cast<int>(threadIdx.x) * 8; at < hidden; at += kThreads * 8) {
    float value[8];
    load_eight(row + at, value);
    if (normed) multiply_eight<T>(norm, scale, at, value);
    store_eight(value, y + std::size_t{blockIdx.x} * hidden + at);
  }
}

/// Bytes: width * 2 * bytes of T per token. Uses one thread block for each token.
template <class T>
__global__ void norm_in_place_kernel(T* y, std::int64_t stride, const Norm norm, int width) {
  __shared__ float sums[kThreads / kWarpSize];
  let_successor_start();
  wait_for_predecessor();
  T* const row = y + std::int64_t{blockIdx.x} * stride;
  const float scale = scale_of<kThreads>(row, norm, width, sums);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    float value[8];
    load_eight(row + at, value);
    multiply_eight<T>(norm, scale, at, value);
    store_eight(value, row + at);
  }
}

/// Bytes: hidden * (12 + bytes of T) per token; the second read of y comes from the cache. Uses one
/// thread block for each token.
template <class T>
__global__ void add_normed_kernel(const float* y, const Norm norm, int hidden, float* x) {
  __shared__ float sums[kThreads / kWarpSize];
  let_successor_start();
  wait_for_predecessor();
  const float* const row = y + std::size_t{blockIdx.x} * hidden;
  float* const to = x + std::size_t{blockIdx.x} * hidden;
  const float scale = scale_of<kThreads>(row, norm, hidden, sums);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < hidden; at += kThreads * 8) {
    float value[8], weight[8], sum[8];
    load_eight(row + at, value);
    load_eight(static_cast<const T*>(norm.gamma) + at, weight);
    load_eight(to + at, sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(value[i] * scale, norm.offset + weight[i], sum[i]);
    store_eight(sum, to + at);
  }
}

/// Bytes: count * (bytes of T + 8).
template <class T>
__global__ void add_residual_kernel(const T* y, std::size_t count, float* x) {
  let_successor_start();
  wait_for_predecessor();
  const std::size_t at = global_thread() * 8;
  if (at + 8 <= count) {
    float added[8], value[8];
    load_eight(y + at, added);
    load_eight(x + at, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] += added[i];
    store_eight(value, x + at);
  } else {
    for (std::size_t i = at; i < count; ++i) x[i] += to_float(y[i]);
  }
}

/// Bytes: 3 * width * bytes of T per token: reads the gate and the up row, writes y.
template <class T>
__global__ void gate_kernel(Activation activation, float clamp, const T* gate_up, int width, T* y) {
  let_successor_start();
  wait_for_predecessor();
  const int at = chunk_of_thread() * 8;
  if (at >= width) return;
  const T* const row = gate_up + std::size_t{blockIdx.x} * 2 * width;
  float gate[8], up[8];
  load_eight(row + at, gate);
  load_eight(row + width + at, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = apply_gate(activation, clamp, gate[i], up[i]);
  store_eight(gate, y + std::size_t{blockIdx.x} * width + at);
}

/// Loads a head, from `row`, into the warp's shared memory, and normalizes it if there is a gamma.
/// Normalized values are rounded to T, so that RoPE rotates the same values that `plain` captures.
template <class T>
__device__ void load_head(const T* row, const T* gamma, const RopeWriteArgs& args, float* head,
                          T* plain) {
  const int head_size = args.cache.head_size;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float scale = 1;
  if (gamma) {
    float squares = 0;
    for (int d = lane; d < head_size; d += kWarpSize) {
      const float value = to_float(row[d]);
      squares = fmaf(value, value, squares);
    }
    scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_size) + args.norm_epsilon);
  }
  for (int d = lane; d < head_size; d += kWarpSize) {
    T value = row[d];
    if (gamma)
      value = from_float<T>(to_float(value) * scale * (args.norm_offset + to_float(gamma[d])));
    if (plain) plain[d] = value;
    head[d] = to_float(value);
  }
  __syncwarp();
}

template <class T>
__device__ void store_rotated(const float* head, const float2* cos_sin, int head_size, int rotated,
                              T* to) {
  const int half = rotated / 2;
  for (int d = static_cast<int>(threadIdx.x) % kWarpSize; d < head_size; d += kWarpSize) {
    float value = head[d];
    if (d < half)
      value = rotate({value, head[d + half]}, cos_sin[d]).x;
    else if (d < rotated)
      value = rotate({head[d - half], value}, cos_sin[d - half]).y;
    to[d] = from_float<T>(value);
  }
}

/// Bytes: (query_heads + 2 kv_heads) * head_size * 2 * bytes of T per token. Uses one warp for each
/// head of a token.
template <class T>
__global__ void rope_write_kernel(const RopeWriteArgs args) {
  extern __shared__ float heads[];
  const kvlab_cache_view& cache = args.cache;
  let_successor_start();
  wait_for_predecessor();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int all = cache.query_heads + 2 * cache.kv_heads;
  const int index = static_cast<int>(blockIdx.y) * (kThreads / kWarpSize) + warp;
  if (index >= all) return;
  const std::size_t token = blockIdx.x, size = static_cast<std::size_t>(cache.head_size);
  const T* const from =
      static_cast<const T*>(args.qkv) + (token * all + static_cast<std::size_t>(index)) * size;

  const bool query = index < cache.query_heads;
  const int kv_head = (index - cache.query_heads) % cache.kv_heads;
  const TokenSlot place_of(args, static_cast<int>(token));
  if (place_of.is_idle()) return;
  const std::int64_t slot = query ? 0 : place_of.head_offset(args, kv_head);
  const std::int64_t cached =
      query || !cache.pages.blocks ? slot : place_of.paged_offset(args, kv_head);
  if (index >= cache.query_heads + cache.kv_heads) {
    for (int d = lane; d < cache.head_size; d += kWarpSize)
      static_cast<T*>(cache.values)[cached + d] = from[d];
    return;
  }
  float* const head = heads + static_cast<std::size_t>(warp) * size;
  const auto place = [&](void* array, int head_index, int head_count) {
    return array ? static_cast<T*>(array) +
                       (token * head_count + static_cast<std::size_t>(head_index)) * size
                 : nullptr;
  };
  const float2* const cos_sin = rope_row(args, static_cast<int>(token));
  if (query) {
    load_head(from, static_cast<const T*>(args.q_gamma), args, head,
              place(args.plain_q, index, cache.query_heads));
    store_rotated(head, cos_sin, cache.head_size, args.rotated,
                  place(args.q, index, cache.query_heads));
  } else {
    load_head(from, static_cast<const T*>(args.k_gamma), args, head,
              place(args.plain_k, kv_head, cache.kv_heads));
    store_rotated(head, cos_sin, cache.head_size, args.rotated,
                  static_cast<T*>(cache.keys) + cached);
    if (lane == 0) place_of.note_position(args, slot);
  }
}

/// Launches under the current device's limits.
template <class... Params, class... Args>
cudaError_t launch_here(void (*kernel)(Params...), const Launch& where, Args... args) {
  DeviceLimits limits;
  const cudaError_t error = device_limits(limits);
  return error == cudaSuccess ? launch(limits, kernel, where, args...) : error;
}

bool valid(int tokens, int width) { return tokens > 0 && width > 0 && width % 8 == 0; }

/// Uses one thread block for each row.
Launch by_row(int tokens, cudaStream_t stream) {
  return {.grid = dim3(static_cast<unsigned>(tokens)), .block = dim3(kThreads), .stream = stream};
}
bool valid(const void* x, const Norm& norm, int tokens, int hidden, const void* y) {
  return valid(tokens, hidden) && x && y && aligned16(x) && aligned16(norm.gamma) && aligned16(y);
}

}  // namespace

cudaError_t embed(Type type, const void* table, int hidden, float scale, const std::int32_t* ids,
                  int tokens, float* x, cudaStream_t stream) {
  if (!valid(tokens, hidden) || !table || !ids || !x || !aligned16(table) || !aligned16(x))
    return cudaErrorInvalidValue;
  return with_type(type, [&]<class T>(T) {
    return launch_here(embed_kernel<T>, by_eight(tokens, hidden, stream),
                       static_cast<const T*>(table), hidden, scale, ids, x);
  });
}

cudaError_t rms_norm(Type type, const float* x, const Norm& norm, int tokens, int hidden, void* y,
                     cudaStream_t stream) {
  if (!valid(x, norm, tokens, hidden, y)) return cudaErrorInvalidValue;
  return with_type(type, [&]<class T>(T) {
    return launch_here(rms_norm_kernel<T>, by_row(tokens, stream), x, norm, hidden,
                       static_cast<T*>(y));
  });
}

cudaError_t add_normed(Type type, const float* y, const Norm& norm, int tokens, int hidden,
                       float* x, cudaStream_t stream) {
  if (!valid(y, norm, tokens, hidden, x) || !norm.gamma) return cudaErrorInvalidValue;
  return with_type(type, [&]<class T>(T) {
    return launch_here(add_normed_kernel<T>, by_row(tokens, stream), y, norm, hidden, x);
  });
}

cudaError_t norm_in_place(Type type, void* y, std::int64_t stride, const Norm& norm, int tokens,
                          int width, cudaStream_t stream) {
  if (!valid(y, norm, tokens, width, y) || !norm.gamma || stride < width || stride % 8 != 0)
    return cudaErrorInvalidValue;
  return with_type(type, [&]<class T>(T) {
    return launch_here(norm_in_place_kernel<T>, by_row(tokens, stream), static_cast<T*>(y), stride,
                       norm, width);
  });
}

cudaError_t squared_norms(const float* x, int tokens, int hidden, float* norms,
                          cudaStream_t stream) {
  if (!valid(tokens, hidden) || !x || !norms || !aligned16(x)) return cudaErrorInvalidValue;
  return launch_here(squared_norms_kernel, by_row(tokens, stream), x, hidden, norms);
}

cudaError_t add_residual(Type type, const void* y, std::size_t count, float* x,
                         cudaStream_t stream) {
  const std::size_t blocks = (count + 8 * kThreads - 1) / (8 * kThreads);
  if (count == 0 || blocks > 0x7fffffffu || !y || !x || !aligned16(y) || !aligned16(x))
    return cudaErrorInvalidValue;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .stream = stream};
  return with_type(type, [&]<class T>(T) {
    return launch_here(add_residual_kernel<T>, where, static_cast<const T*>(y), count, x);
  });
}

cudaError_t gate(Type type, Activation activation, float clamp, const void* gate_up, int tokens,
                 int width, void* y, cudaStream_t stream) {
  if (!valid(tokens, width) || !gate_up || !y || !aligned16(gate_up) || !aligned16(y))
    return cudaErrorInvalidValue;
  return with_type(type, [&]<class T>(T) {
    return launch_here(gate_kernel<T>, by_eight(tokens, width, stream), activation, clamp,
                       static_cast<const T*>(gate_up), width, static_cast<T*>(y));
  });
}

bool valid(const RopeWriteArgs& args) {
  constexpr int kMaxHeadSize = 1024;
  const kvlab_cache_view& cache = args.cache;
  return args.tokens > 0 && cache.query_heads > 0 && cache.kv_heads > 0 && cache.head_size > 0 &&
         cache.head_size <= kMaxHeadSize && args.rotated >= 0 && args.rotated % 2 == 0 &&
         args.rotated <= cache.head_size && args.qkv && args.sequences && cache.keys &&
         cache.values && args.q && (args.rotated == 0 || (args.rope && args.rope_rows)) &&
         (cache.first_slot ? cache.next_slots != nullptr : args.slots && !cache.pages.blocks);
}

cudaError_t rope_write(const RopeWriteArgs& args, cudaStream_t stream) {
  constexpr int kWarps = kThreads / kWarpSize;
  if (!valid(args)) return cudaErrorInvalidValue;
  const int heads = args.cache.query_heads + 2 * args.cache.kv_heads;
  const Launch where{
      .grid = dim3(static_cast<unsigned>(args.tokens),
                   static_cast<unsigned>((heads + kWarps - 1) / kWarps)),
      .block = dim3(kThreads),
      .shared_bytes = kWarps * static_cast<std::size_t>(args.cache.head_size) * sizeof(float),
      .stream = stream};
  return with_type(args.cache.type,
                   [&]<class T>(T) { return launch_here(rope_write_kernel<T>, where, args); });
}

}  // namespace kvlab::kernels
