// Computes the data that all caches of a head task share: rotated vectors, the exponentials of a
// block of queries, and the full cache's outputs.
#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/fold.cuh"
#include "kernels/device/half_parts.cuh"
#include "kernels/device/load.cuh"
#include "kernels/device/mass_sum.hpp"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// The part of x that fits in TF32 or, with `left`, the remainder.
__device__ inline float tf32_part(float x, bool left) {
  const float kept = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
  return left ? x - kept : kept;
}

/// Uses one warp for each vector.
template <class T>
__global__ void rotate_kernel(const ReplayRotateArgs args, T* rounded) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (row >= args.tokens) return;
  const int half = args.rotated / 2, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t first = std::int64_t{row} * args.from.stride;
  const auto from = [&](int d) { return load1(args.from.data, args.from.type, first + d); };
  const std::int64_t to = (std::int64_t{row} * args.group + args.group_head) * args.head_size;
  const auto put = [&](int d, float value) {
    if (args.plain) args.plain[to + d] = value;
    if (args.parts) {
      float* const parts = args.parts + 3 * to + d;
      parts[0] = parts[2 * args.head_size] = tf32_part(value, false);
      parts[args.head_size] = tf32_part(value, true);
    }
    if (rounded) rounded[to + d] = from_float<T>(value);
  };
  for (int d = lane; d < half; d += kWarpSize) {
    const float2 angle = args.rope[std::int64_t{row} * half + d];
    const float low = from(d), high = from(d + half);
    put(d, low * angle.x - high * angle.y);
    put(d + half, high * angle.x + low * angle.y);
  }
  for (int d = args.rotated + lane; d < args.head_size; d += kWarpSize) put(d, from(d));
}

/// Uses one thread for each element of a head task's queries [query, head, dim] (x), for each head
/// task (y).
__global__ void query_parts_kernel(int elements, int head_size, std::int64_t task_stride,
                                   std::int64_t to_stride, const float* from, float* to) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= elements) return;
  const float value = from[blockIdx.y * task_stride + at], kept = tf32_part(value, false);
  float* const parts =
      to + blockIdx.y * to_stride + at / head_size * 3 * head_size + at % head_size;
  parts[0] = parts[head_size] = kept;
  parts[2 * head_size] = tf32_part(value, true);
}

/// Folds four values over the thread block, and returns the results in every thread. `shared`:
/// [kWarps][4], which may be reused after the next barrier.
template <class Fold>
__device__ float4 block_fold4(const float4& value, float (*shared)[4], Fold fold) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const float folded = warp_fold4(value, fold);
  if (lane < 4) shared[threadIdx.x / kWarpSize][lane] = folded;
  __syncthreads();
  float all = shared[0][lane % 4];
  for (int warp = 1; warp < kWarps; ++warp) all = fold(all, shared[warp][lane % 4]);
  return gather_lanes(all, 0);
}

/// The products of one query with all tokens, for the heads of one head group.
struct HeadGroupRow {
  const float* products;  // [head, token]
  int tokens, heads;
  float scale;

  /// The scaled products of four heads. Padding heads give 0.
  __device__ float4 operator[](int token) const {
    return {at(0, token), at(1, token), at(2, token), at(3, token)};
  }
  __device__ float at(int head, int token) const {
    return head < heads ? products[std::int64_t{head} * tokens + token] * scale : 0.0f;
  }
};

/// For each head, the lowest exponential at which the row requests a token. It is infinite for
/// padding heads.
__device__ float4 min_requested_of(const float4& sum, int heads, std::uint32_t threshold16) {
  const auto request_threshold = [&](float row_sum, int head) {
    if (head >= heads) return __int_as_float(0x7f800000);
    const float p = request_floor(fixed_mass(1.0f, 1 / row_sum), threshold16);
    return p < 0 ? 0.0f : p * row_sum;
  };
  return {request_threshold(sum.x, 0), request_threshold(sum.y, 1), request_threshold(sum.z, 2),
          request_threshold(sum.w, 3)};
}

/// The first values of a row, in shared memory. Only the thread that stored a value reads it.
struct RowCache {
  float4* values;
  int count;
  __device__ void put(int token, const float4& x) const {
    if (token < count) values[token] = x;
  }
  /// Returns the value that put() stored. If it stored none, reads it from `row`.
  template <class Row>
  __device__ float4 get(int token, const Row& row) const {
    return token < count ? values[token] : row[token];
  }
};
constexpr int kMaxCached = 4096;    // lets three thread blocks run on a multiprocessor
constexpr int kStaticBytes = 1024;  ///< bytes of shared memory in addition to the cached tokens

struct RowScratch {
  float largest[kWarps][4], sums[kWarps][4];
};
struct RowTotals {
  float4 max_logit, sum;
};
/// Computes the exponentials of a row's first `length` products into `e` and into the cache, scaled
/// so that the largest is 1. Called by the whole thread block.
__device__ RowTotals exponentiate(const HeadGroupRow& row, int length, float4* e,
                                  const RowCache& cache, RowScratch& scratch) {
  float4 max_logit = row[0];
#pragma unroll 4
  for (int t = static_cast<int>(threadIdx.x); t < length; t += kThreads) {
    const float4 x = row[t];
    cache.put(t, x);
    raise(max_logit, x);
  }
  max_logit = block_fold4(max_logit, scratch.largest, Larger{});
  float4 sum{};
  for (int t = static_cast<int>(threadIdx.x); t < length; t += kThreads) {
    const float4 x = cache.get(t, row);
    const float4 y{expf(x.x - max_logit.x), row.heads > 1 ? expf(x.y - max_logit.y) : 0.0f,
                   row.heads > 2 ? expf(x.z - max_logit.z) : 0.0f,
                   row.heads > 3 ? expf(x.w - max_logit.w) : 0.0f};
    cache.put(t, y);
    e[t] = y;
    add(sum, y);
  }
  return {max_logit, block_fold4(sum, scratch.sums, Add{})};
}

/// Counts how many of a row's first tokens each head requests: adds to the thread block's `counts`,
/// and stores the totals in `to`. Called by the whole thread block.
__device__ void count_wanted(const float4* e, int tokens, const float4& request_threshold,
                             const RowCache& cache, std::uint32_t (&counts)[4], uint4& to) {
  uint4 wanted{};
  for (int t = static_cast<int>(threadIdx.x); t < tokens; t += kThreads)
    count_from(wanted, cache.get(t, e), request_threshold);
  wanted = warp_sum4(wanted);
  if (threadIdx.x % kWarpSize == 0) {
    atomicAdd(&counts[0], wanted.x), atomicAdd(&counts[1], wanted.y);
    atomicAdd(&counts[2], wanted.z), atomicAdd(&counts[3], wanted.w);
  }
  __syncthreads();
  if (threadIdx.x == 0) to = {counts[0], counts[1], counts[2], counts[3]};
}

/// Uses one thread block for each query (x), head group (y) and head task (z). The block keeps
/// `cached` tokens in shared memory.
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ ReplayRowsArgs args, int cached) {
  extern __shared__ float4 cached_tokens[];
  __shared__ RowScratch scratch;
  __shared__ std::uint32_t counts[4];
  const ReplayShape& shape = args.shape;
  const int i = static_cast<int>(blockIdx.x), head_group = static_cast<int>(blockIdx.y);
  const int query = args.rows.first + i, length = query + 1;
  const std::int64_t query_row = args.rows.row(blockIdx.z, i);
  const std::int64_t head_group_row = query_row * shape.head_groups() + head_group;
  const std::int64_t first_product = (query_row * shape.group + 4 * head_group) * shape.tokens;
  const HeadGroupRow row{args.products + first_product, shape.tokens, shape.group - 4 * head_group,
                         shape.softmax_scale};
  float4* const e = args.rows.e + head_group_row * shape.tokens;
  const RowCache cache{cached_tokens, cached};

  if (threadIdx.x < 4) counts[threadIdx.x] = 0;
  RowTotals totals = exponentiate(row, length, e, cache, scratch);
  const float4 request_threshold = min_requested_of(totals.sum, row.heads, shape.threshold16);
  if (threadIdx.x == 0) {
    args.rows.sums[head_group_row] = totals.sum;
    args.rows.request_threshold[head_group_row] = request_threshold;
    if (args.exact_max) args.exact_max[head_group_row] = totals.max_logit;
  }
  if (args.measured.index[query] >= 0)
    count_wanted(e, query, request_threshold, cache, counts, args.rows.wanted[head_group_row]);
  if (args.unrounded)
    totals =
        exponentiate({args.unrounded + first_product, shape.tokens, row.heads, row.scale}, length,
                     args.cache_positions.e + head_group_row * shape.tokens, cache, scratch);
  if (args.cache_positions.max_logits && threadIdx.x == 0)
    args.cache_positions.max_logits[head_group_row] = totals.max_logit;
}

/// The dimension that is the first or, with `high`, the second element of a pair; -1 for padding.
__device__ inline int dimension_of(const ReplayShape& shape, int pair, bool high) {
  const int half = shape.rotated / 2;
  if (pair < half) return pair + (high ? half : 0);
  const int d = shape.rotated + 2 * (pair - half) + (high ? 1 : 0);
  return d < shape.head_size ? d : -1;
}

/// The power of two that scales `largest` to [2^10, 2^11), so that float16 can represent it, its
/// rotations, and most of the rounding errors of smaller numbers. If the inverse of that power is
/// not a normal number, returns the nearest power whose inverse is a normal number.
__device__ inline float scale_to_half(float largest) {
  const auto exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  return __uint_as_float(static_cast<std::uint32_t>(min(max(264 - exponent, 1), 253)) << 23);
}

/// One column of a query group's products: the query and head that a column of
/// cache_positions.fragments stands for.
struct QueryColumn {
  const ReplayShape& shape;
  const float* from;  ///< null if there is no such query
  float factor, scale = 1;

  __device__ QueryColumn(const ReplayRowsArgs& args, int query_group, int column, int task)
      : shape(args.shape), from(nullptr), factor(args.shape.rotated > 0 ? args.rope[0].x : 1.0f) {
    const int heads = 4 * shape.head_groups(), i = query_group * kReplayAhead + column / heads,
              head = column % heads;
    if (i >= args.rows.count || head >= shape.group) return;
    const std::int64_t query = shape.vector(task, args.rows.first + i);
    from = args.plain_queries + query * shape.group + head * shape.head_size;
  }
  __device__ float at(int d) const {
    return from && d >= 0 ? from[d] * (d < shape.rotated ? factor : 1.0f) * scale : 0.0f;
  }
};

constexpr int kMaxColumns = kReplayAhead * kMaxReplayGroup;

/// Uses one thread block for each query group (x) and head task (y). Queries beyond the end of the
/// block are written as zeros.
__global__ void __launch_bounds__(kThreads)
    fragments_kernel(const __grid_constant__ ReplayRowsArgs args) {
  __shared__ float scales[kMaxColumns];
  const ReplayShape& shape = args.shape;
  const int heads = 4 * shape.head_groups(), columns = kReplayAhead * heads,
            query_group = static_cast<int>(blockIdx.x), task = static_cast<int>(blockIdx.y),
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* const to_scales = reinterpret_cast<float*>(
      args.cache_positions.scales +
      args.rows.row(task, query_group * kReplayAhead) * shape.head_groups());
  for (int column = static_cast<int>(threadIdx.x) / kWarpSize; column < columns; column += kWarps) {
    const QueryColumn query(args, query_group, column, task);
    float largest = 0;
    for (int d = lane; d < shape.head_size; d += kWarpSize)
      largest = fmaxf(largest, fabsf(query.at(d)));
    const float scale = scale_to_half(warp_max(largest));
    scales[column] = scale;
    if (lane == 0) to_scales[column] = shape.softmax_scale / scale;
  }
  __syncthreads();
  const int query_group_size = shape.pairs() / 8 * (columns / 8) * kWarpSize;
  const std::int64_t query_groups = args.rows.block / kReplayAhead;
  uint4* const to =
      args.cache_positions.fragments + (task * query_groups + query_group) * query_group_size;
  for (int at = static_cast<int>(threadIdx.x); at < query_group_size; at += kThreads) {
    const int step_index = at % (columns / 8 * kWarpSize), step = at / (columns / 8 * kWarpSize),
              column = step_index / kWarpSize * 8 + lane / 4,
              pair = step / 2 * kReplayGranule + 4 * (lane % 4) + step % 2 * 2;
    QueryColumn query(args, query_group, column, task);
    query.scale = scales[column];
    const auto two = [&](bool high) {
      return HalfParts::split(query.at(dimension_of(shape, pair, high)),
                              query.at(dimension_of(shape, pair + 1, high)));
    };
    const HalfParts low = two(false), high = two(true);
    to[at] = {low.kept, high.kept, low.left, high.left};
  }
}

/// Uses one warp for each token.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pair_keys_kernel(const ReplayShape shape, int tokens, const ReplayVectors from, T* to,
                     float* scales) {
  const int token =
                static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize, elements = 2 * shape.pairs();
  if (token >= tokens) return;
  const auto element = [&](int d) {
    return load1(from.data, from.type, std::int64_t{token} * from.stride + d);
  };
  to += std::int64_t{token} * elements;
  float largest = 0;
  for (int d = lane; d < shape.head_size; d += kWarpSize)
    largest = fmaxf(largest, fabsf(element(d)));
  const float scale = scale_to_half(warp_max(largest));
  if (lane == 0) scales[token] = 1 / scale;
  for (int n = lane; n < elements; n += kWarpSize) {
    const int d = dimension_of(shape, n / 8 * 4 + n % 4, n % 8 / 4 == 1);
    to[n] = from_float<T>(d < 0 ? 0.0f : element(d) * scale);
  }
}

/// Computes the full cache's outputs of sampled queries. Uses one thread block for each query (x),
/// head group (y) and head task (z). The warps share the tokens; each lane computes four dimensions
/// of four heads.
__global__ void __launch_bounds__(kThreads)
    outputs_kernel(const __grid_constant__ ReplayRowsArgs args) {
  __shared__ float4 partial[kWarps][4][kWarpSize];
  const ReplayShape& shape = args.shape;
  const int i = static_cast<int>(blockIdx.x), head_group = static_cast<int>(blockIdx.y);
  const int query = args.rows.first + i, index = args.measured.index[query];
  if (!args.measured.samples(index)) return;
  const std::int64_t query_row = args.rows.row(blockIdx.z, i);
  const std::int64_t head_group_row = query_row * shape.head_groups() + head_group;
  const float4* const e = args.rows.e + head_group_row * shape.tokens;
  const float4 row_sum = args.rows.sums[head_group_row];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  for (int first = 0; first < shape.head_size; first += 4 * kWarpSize) {
    const int d = first + 4 * lane;
    float4 sums[4] = {};
    if (d < shape.head_size)
      for (int t = warp; t <= query; t += kWarps) {
        const float4 weight = e[t];
        const float4 value = load4(args.values, shape.type, shape.vector(blockIdx.z, t) + d);
#pragma unroll
        for (int head = 0; head < 4; ++head)
          add_product(sums[head], component(weight, head), value);
      }
#pragma unroll
    for (int head = 0; head < 4; ++head) partial[warp][head][lane] = sums[head];
    __syncthreads();
    if (warp < 4 && 4 * head_group + warp < shape.group && d < shape.head_size) {
      float4 all{};
      for (int w = 0; w < kWarps; ++w) add(all, partial[w][warp][lane]);
      const float over = 1 / component(row_sum, warp);
      *reinterpret_cast<float4*>(
          args.outputs + (query_row * shape.group + 4 * head_group + warp) * shape.head_size +
          d) = {all.x * over, all.y * over, all.z * over, all.w * over};
    }
    __syncthreads();
  }
}

/// Uses one thread block for each query and head (x) and head task (y).
template <class T>
__global__ void __launch_bounds__(kThreads)
    softmax_kernel(const __grid_constant__ ReplaySoftmaxArgs args, T* to) {
  __shared__ float shared[2][kWarps];
  const int row = static_cast<int>(blockIdx.x), length = args.first + row / args.shape.group + 1,
            width = args.first + args.count;
  const std::int64_t at =
      (std::int64_t{blockIdx.y} * args.block * args.shape.group + row) * args.shape.tokens;
  const float* const products = args.products + at;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  float max_logit = products[0];
  for (int t = thread; t < length; t += kThreads) max_logit = fmaxf(max_logit, products[t]);
  max_logit = warp_max(max_logit);
  if (thread % kWarpSize == 0) shared[0][warp] = max_logit;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) max_logit = fmaxf(max_logit, shared[0][w]);
  const float factor = args.shape.softmax_scale * 1.44269504f;
  float sum = 0;
  for (int t = thread; t < length; t += kThreads) sum += exp2f((products[t] - max_logit) * factor);
  const float over = 1 / block_sum(sum, shared[1]);
  for (int t = thread; t < width; t += kThreads)
    to[at + t] =
        from_float<T>(t < length ? exp2f((products[t] - max_logit) * factor) * over : 0.0f);
}

}  // namespace

cudaError_t replay_softmax(const ReplaySoftmaxArgs& args, cudaStream_t stream) {
  if (args.count < 1 || args.count > args.block || args.shape.tasks > 65535)
    return cudaErrorInvalidValue;
  const dim3 grid = grid_of(args.count * args.shape.group, args.shape.tasks);
  return with_type(args.type, [&](auto zero) {
    softmax_kernel<<<grid, kThreads, 0, stream>>>(args, static_cast<decltype(zero)*>(args.to));
    return cudaGetLastError();
  });
}

cudaError_t replay_rotate(const ReplayRotateArgs& args, cudaStream_t stream) {
  if (args.tokens < 1 || args.rotated > args.head_size) return cudaErrorInvalidValue;
  return with_type(args.rounding, [&](auto zero) {
    rotate_kernel<<<(args.tokens + kWarps - 1) / kWarps, kThreads, 0, stream>>>(
        args, static_cast<decltype(zero)*>(args.rounded));
    return cudaGetLastError();
  });
}

int replay_cached_tokens(int tokens, const DeviceLimits& limits) {
  const int fit = (limits.shared_bytes - kStaticBytes) / static_cast<int>(sizeof(float4));
  return std::min({tokens, kMaxCached, fit});
}

cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream) {
  const ReplayShape& shape = args.shape;
  if (!shape.is_launchable() || !args.rows.is_launchable()) return cudaErrorInvalidValue;
  const dim3 grid = grid_of(args.rows.count, shape.head_groups(), shape.tasks);
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  const int cached = replay_cached_tokens(args.rows.first + args.rows.count, limits),
            bytes = cached * static_cast<int>(sizeof(float4));
  if (const cudaError_t error = cudaFuncSetAttribute(
          rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
          replay_cached_tokens(kMaxCached, limits) * static_cast<int>(sizeof(float4)));
      error != cudaSuccess)
    return error;
  rows_kernel<<<grid, kThreads, static_cast<unsigned>(bytes), stream>>>(args, cached);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (args.outputs) outputs_kernel<<<grid, kThreads, 0, stream>>>(args);
  if (const cudaError_t error = cudaGetLastError();
      error != cudaSuccess || !args.cache_positions.fragments)
    return error;
  const int query_groups = (args.rows.count + kReplayAhead - 1) / kReplayAhead;
  fragments_kernel<<<grid_of(query_groups, shape.tasks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t replay_query_parts(const ReplayShape& shape, int first, int count, int block,
                               const float* queries, float* to, cudaStream_t stream) {
  if (first < 0 || count < 1 || count > block || !shape.is_launchable())
    return cudaErrorInvalidValue;
  const int query_size = shape.group * shape.head_size, elements = count * query_size;
  query_parts_kernel<<<grid_of((elements + kThreads - 1) / kThreads, shape.tasks), kThreads, 0,
                       stream>>>(elements, shape.head_size, std::int64_t{shape.tokens} * query_size,
                                 std::int64_t{block} * query_size * 3,
                                 queries + std::int64_t{first} * query_size, to);
  return cudaGetLastError();
}

cudaError_t replay_pair_keys(const ReplayShape& shape, int tokens, const ReplayVectors& from,
                             Type type, void* to, float* scales, cudaStream_t stream) {
  if (tokens < 1) return cudaErrorInvalidValue;
  return with_type(type, [&](auto zero) {
    pair_keys_kernel<<<static_cast<unsigned>((tokens + kWarps - 1) / kWarps), kThreads, 0,
                       stream>>>(shape, tokens, from, static_cast<decltype(zero)*>(to), scales);
    return cudaGetLastError();
  });
}

}  // namespace kvlab::kernels
