// Causal attention of many queries, flash style: a CTA keeps a tile of rows and walks over the keys
// once.
//
// Work: 4 * head_size operations for each (query, query head, visible key). Tensor cores do it for
// the 2-byte types; float32 is done plainly.
#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/prefill_rows.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = 64;        ///< keys of a tile
constexpr int kRowsOfWarp = 32;  ///< two rows of matrices: what is read of a key serves both
constexpr int kRows = kWarps * kRowsOfWarp;
constexpr int kStages = 2;

struct Plan {
  PrefillAttentionArgs args;
  int group;
  float base2_scale;  ///< softmax scale, for base-2 logits
};

/// Which tile of rows is a CTA's. The last rows see most keys and go first, of all KV heads: so the
/// card stays full to the end.
__device__ int tile_of_block(const Plan& plan) {
  return static_cast<int>((gridDim.x - 1 - blockIdx.x) / plan.args.shape.kv_heads);
}
__device__ int kv_head_of_block(const Plan& plan) {
  return static_cast<int>(blockIdx.x % plan.args.shape.kv_heads);
}

template <class T, int kDim>
struct alignas(16) Shared {
  T query[kRows * kDim];
  T keys[kStages][kKeys * kDim];
  T values[kStages][kKeys * kDim];
};

/// Starts copying rows [slot, dim] from `from`; zeros from row `valid` on. By the whole CTA.
template <class T, int kDim>
__device__ void load_slots(T* to, const T* from, int valid) {
  using Layout = Swizzled<kDim * sizeof(T)>;
#pragma unroll
  for (int i = threadIdx.x; i < kKeys * Layout::kChunks; i += kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    copy_async(shared_address(to) + Layout::offset(row, chunk), from + (row < valid ? i * 8 : 0),
               row < valid);
  }
}

/// A warp's 32 rows: matrix row m holds, in lane l, rows m * 16 + l / 4 and the eighth after that.
template <class T, int kDim>
class WarpRows {
 public:
  using Layout = Swizzled<kDim * sizeof(T)>;

  __device__ WarpRows() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        out_[m][n][0] = out_[m][n][1] = out_[m][n][2] = out_[m][n][3] = 0;
      max_[m][0] = max_[m][1] = -INFINITY;
      sum_[m][0] = sum_[m][1] = 0;
    }
  }

  /// Adds a tile of keys; `visible(m, half)` is how many of them that row sees, kKeys or more for
  /// all.
  template <bool kMasked, class Visible>
  __device__ void add(const T* query, const T* keys, const T* values, float base2_scale,
                      Visible visible) {
    float weight[2][kKeys / 8][4] = {};
    score(query, keys, weight);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kMasked) mask(weight[m], half, visible(m, half));
        weigh(weight[m], m, half, base2_scale);
      }
    add_values(values, weight);
  }

  /// Calls write(m, half, n, two values) for the columns n * 8 + l % 4 * 2 of each row, divided by
  /// the sum, and lse(m, half, value) for each row.
  template <class Write, class Lse>
  __device__ void finish(Write write, Lse lse) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[m][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = 1 / sum;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          write(m, half, n,
                pack<T>(out_[m][n][half * 2] * inverse, out_[m][n][half * 2 + 1] * inverse));
        lse(m, half, log_sum_exp(max_[m][half], sum));
      }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void score(const T* query, const T* keys, float (&logit)[2][kKeys / 8][4]) const {
    const std::uint32_t q = shared_address(query), k = shared_address(keys);
    const int key = lane() / 16 * 8 + lane() % 8;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_matrices(a[m], q + Layout::offset(m * 16 + lane() % 16, d * 2 + lane() / 16));
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, k + Layout::offset(n * 8 + key, d * 2 + lane() / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(logit[m][n], a[m], b[0], b[1]);
          multiply_add<T>(logit[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ static void mask(float (&logit)[kKeys / 8][4], int half, int visible) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (n * 8 + lane() % 4 * 2 + i >= visible) logit[n][half * 2 + i] = -INFINITY;
  }

  /// Logits to weights of one row, relative to its largest logit so far. The row has seen a key.
  __device__ void weigh(float (&logit)[kKeys / 8][4], int m, int half, float base2_scale) {
    float largest = logit[0][half * 2];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
      largest = fmaxf(largest, fmaxf(logit[n][half * 2], logit[n][half * 2 + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    raise_max(m, half, fmaxf(max_[m][half], largest * base2_scale));
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = logit[n][half * 2 + i];
        x = exp2_fast(fmaf(x, base2_scale, -max_[m][half]));
        sum_[m][half] += x;
      }
  }

  __device__ void raise_max(int m, int half, float max) {
    if (__any_sync(~0u, max != max_[m][half])) {
      const float factor = rescale(max_[m][half], max);
      sum_[m][half] *= factor;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out_[m][n][half * 2] *= factor;
        out_[m][n][half * 2 + 1] *= factor;
      }
    }
    max_[m][half] = max;
  }

  __device__ void add_values(const T* values, const float (&weight)[2][kKeys / 8][4]) {
    const std::uint32_t v = shared_address(values);
    const int key = lane() / 8 % 2 * 8 + lane() % 8;
#pragma unroll
    for (int k = 0; k < kKeys / 8; k += 2) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        a[m][0] = pack<T>(weight[m][k][0], weight[m][k][1]);
        a[m][1] = pack<T>(weight[m][k][2], weight[m][k][3]);
        a[m][2] = pack<T>(weight[m][k + 1][0], weight[m][k + 1][1]);
        a[m][3] = pack<T>(weight[m][k + 1][2], weight[m][k + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices_transposed(b, v + Layout::offset(k * 8 + key, n + lane() / 16));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(out_[m][n], a[m], b[0], b[1]);
          multiply_add<T>(out_[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  float out_[2][kDim / 8][4];
  float max_[2][2], sum_[2][2];  // sum_: over this lane's keys alone, until finish
};

/// The tensor-core kernel.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2) prefill_tiles(const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(memory);
  using Layout = Swizzled<kDim * sizeof(T)>;
  const auto& args = plan.args;
  const PrefillRows rows{args, plan.group, kv_head_of_block(plan)};
  const int first_row = tile_of_block(plan) * kRows;
  const int last_row = min(first_row + kRows, rows.count()) - 1;
  const int keys_end = rows.position(last_row) + 1;
  const int tiles = (keys_end + kKeys - 1) / kKeys;
  const int unmasked = (rows.position(first_row) + 1) / kKeys;  // tiles that all rows see whole

  const T* q = static_cast<const T*>(args.q);
  for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
    const int row = first_row + i / Layout::kChunks, chunk = i % Layout::kChunks;
    const bool wanted = row <= last_row;
    copy_async(shared_address(shared.query) + Layout::offset(i / Layout::kChunks, chunk),
               q + (wanted ? rows.head(row) * kDim + chunk * 8 : 0), wanted);
  }
  const T* keys = static_cast<const T*>(args.keys) + rows.kv_head * args.shape.head_stride;
  const T* values = static_cast<const T*>(args.values) + rows.kv_head * args.shape.head_stride;
  const auto fetch = [&](int tile) {
    if (tile < tiles) {
      const std::int64_t from = std::int64_t{tile} * kKeys * kDim;
      const int valid = keys_end - tile * kKeys;
      load_slots<T, kDim>(shared.keys[tile % kStages], keys + from, valid);
      load_slots<T, kDim>(shared.values[tile % kStages], values + from, valid);
    }
    commit_copies();
  };
  fetch(0);

  const int warp_row = threadIdx.x / 32 * kRowsOfWarp;
  const int lane_row = first_row + warp_row + threadIdx.x % 32 / 4;
  const auto row_of = [&](int m, int half) { return lane_row + m * 16 + half * 8; };
  int position[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) position[m][half] = rows.position(row_of(m, half));

  WarpRows<T, kDim> warp;
  const T* query = shared.query + warp_row * kDim;
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();  // the tile is there, and the one before it has been read
    fetch(tile + 1);
    const T* tile_keys = shared.keys[tile % kStages];
    const T* tile_values = shared.values[tile % kStages];
    const auto visible = [&](int m, int half) { return position[m][half] + 1 - tile * kKeys; };
    if (tile < unmasked)
      warp.template add<false>(query, tile_keys, tile_values, plan.base2_scale, visible);
    else
      warp.template add<true>(query, tile_keys, tile_values, plan.base2_scale, visible);
  }

  auto* out = static_cast<std::uint32_t*>(args.out);
  const int lane = threadIdx.x % 32;
  warp.finish(
      [&](int m, int half, int n, std::uint32_t two) {
        const int row = row_of(m, half);
        if (row <= last_row) out[rows.head(row) * (kDim / 2) + n * 4 + lane % 4] = two;
      },
      [&](int m, int half, float lse) {
        const int row = row_of(m, half);
        if (row <= last_row && lane % 4 == 0 && args.lse != nullptr) args.lse[rows.head(row)] = lse;
      });
}

constexpr int kPlainRows = 16, kPlainKeys = 32;

/// Float32: a warp has four rows and, at a time, 32 keys, one for each lane.
template <int kDim>
__global__ void __launch_bounds__(kThreads) prefill_plain(const __grid_constant__ Plan plan) {
  __shared__ float query[kPlainRows][kDim];
  __shared__ float keys[kPlainKeys][kDim + 1];  // padded: lanes read a column
  const auto& args = plan.args;
  const PrefillRows rows{args, plan.group, kv_head_of_block(plan)};
  const int first_row = tile_of_block(plan) * kPlainRows;
  const int last_row = min(first_row + kPlainRows, rows.count()) - 1;
  const int keys_end = rows.position(last_row) + 1;
  const float* q = static_cast<const float*>(args.q);
  for (int i = threadIdx.x; i < kPlainRows * kDim; i += kThreads) {
    const int row = first_row + i / kDim;
    query[i / kDim][i % kDim] = row <= last_row ? q[rows.head(row) * kDim + i % kDim] : 0;
  }
  const float* all_keys =
      static_cast<const float*>(args.keys) + rows.kv_head * args.shape.head_stride;
  const float* all_values =
      static_cast<const float*>(args.values) + rows.kv_head * args.shape.head_stride;

  constexpr int kEach = kPlainRows / kWarps, kOwn = kDim / 32;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kEach;
  float out[kEach][kOwn] = {}, max[kEach], sum[kEach] = {};
  for (float& m : max) m = -INFINITY;
  for (int start = 0; start < keys_end; start += kPlainKeys) {
    const int there = min(kPlainKeys, keys_end - start);
    __syncthreads();
    for (int i = threadIdx.x; i < there * kDim; i += kThreads)
      keys[i / kDim][i % kDim] = all_keys[std::int64_t{start} * kDim + i];
    __syncthreads();
    float weight[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      float dot = 0;
      if (lane < there)
        for (int d = 0; d < kDim; ++d) dot = fmaf(query[warp_row + r][d], keys[lane][d], dot);
      const bool seen = start + lane <= rows.position(first_row + warp_row + r) && lane < there;
      const float logit = seen ? dot * plan.base2_scale : -INFINITY;
      float largest = logit;
      for (int step = 16; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      largest = fmaxf(largest, max[r]);
      weight[r] = exp2_fast(logit - largest);
      const float factor = rescale(max[r], largest);
      max[r] = largest;
      float tile_sum = weight[r];
      for (int step = 16; step > 0; step /= 2) tile_sum += __shfl_xor_sync(~0u, tile_sum, step);
      sum[r] = fmaf(sum[r], factor, tile_sum);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) out[r][i] *= factor;
    }
    for (int key = 0; key < there; ++key) {
      const float* value = all_values + std::int64_t{start + key} * kDim;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const float w = __shfl_sync(~0u, weight[r], key);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) out[r][i] = fmaf(w, value[i * 32 + lane], out[r][i]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int row = first_row + warp_row + r;
    if (row > last_row) continue;
    float* to = static_cast<float*>(args.out) + rows.head(row) * kDim;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i * 32 + lane] = out[r][i] / sum[r];
    if (lane == 0 && args.lse != nullptr) args.lse[rows.head(row)] = log_sum_exp(max[r], sum[r]);
  }
}

/// CTAs for all tiles of all KV heads.
unsigned grid(const Plan& plan, int rows_of_tile) {
  const int rows = plan.args.queries * plan.group;
  return static_cast<unsigned>((rows + rows_of_tile - 1) / rows_of_tile) * plan.args.shape.kv_heads;
}

template <class T, int kDim>
cudaError_t launch_tiles(const Plan& plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<T, kDim>);
  const cudaError_t allowed = cudaFuncSetAttribute(
      prefill_tiles<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  prefill_tiles<T, kDim><<<grid(plan, kRows), kThreads, kBytes, stream>>>(plan);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  switch (plan.args.shape.type) {
    case Type::bf16:
      return launch_tiles<__nv_bfloat16, kDim>(plan, stream);
    case Type::f16:
      return launch_tiles<__half, kDim>(plan, stream);
    case Type::f32:
      break;
  }
  prefill_plain<kDim><<<grid(plan, kPlainRows), kThreads, 0, stream>>>(plan);
  return cudaGetLastError();
}

bool supported(const PrefillAttentionArgs& args) {
  const AttentionShape& shape = args.shape;
  if (shape.kv_heads < 1 || shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0)
    return false;
  constexpr int kMostGroup = 8;
  if (shape.query_heads / shape.kv_heads > kMostGroup) return false;
  if (shape.head_stride % (16 / static_cast<std::int64_t>(bytes_of(shape.type))) != 0) return false;
  constexpr int kMostPosition = 1 << 27;  // so that eight times as many rows can be counted
  if (args.first < 0 || args.first >= kMostPosition) return false;
  if (args.queries < 1 || args.queries >= kMostPosition) return false;
  constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;
  return std::int64_t{args.queries} * shape.query_heads < kMostCtas;
}

bool aligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

cudaError_t prefill_attention(const PrefillAttentionArgs& args, cudaStream_t stream) {
  if (!supported(args) || !aligned(args.q) || !aligned(args.keys) || !aligned(args.values) ||
      !aligned(args.out))
    return cudaErrorInvalidValue;
  const Plan plan{.args = args,
                  .group = args.shape.query_heads / args.shape.kv_heads,
                  .base2_scale = args.shape.softmax_scale * kLog2E};
  switch (args.shape.head_size) {
    case 64:
      return launch<64>(plan, stream);
    case 96:
      return launch<96>(plan, stream);
    case 128:
      return launch<128>(plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kvlab::kernels
