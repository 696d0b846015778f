// What one warp does with a tile of cached keys and values under the query heads of one KV head: by
// the tensor cores (2-byte types) or by plain float32. Both keep the running softmax in registers.
//
// A tile is kKeys consecutive slots of one KV head, keys and values [slot, dim], in shared memory.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// Query heads that share a KV head, at most.
inline constexpr int kMostGroup = 8;

/// What a warp has found out about its keys; rows beyond the group are left as they are.
template <int kDim>
struct WarpPart {
  float out[kMostGroup][kDim];
  float max[kMostGroup], sum[kMostGroup];
};

/// One tile in shared memory.
template <class T, int kDim, int kKeys>
struct alignas(16) CacheTile {
  using Layout = Swizzled<kDim * sizeof(T)>;
  T keys[kKeys * kDim];
  T values[kKeys * kDim];

  /// Starts copying the first `valid` slots from `from_keys`, `from_values`; zeros for the rest:
  /// what an unused slot holds may not be a number. By a whole warp.
  __device__ void load(const T* from_keys, const T* from_values, int valid) {
    const int lane = threadIdx.x % 32;
    constexpr int kPerChunk = 16 / sizeof(T);
#pragma unroll
    for (int i = lane; i < kKeys * Layout::kChunks; i += 32) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const bool wanted = row < valid;
      const int from = wanted ? i * kPerChunk : 0;
      copy_async(shared_address(keys) + Layout::offset(row, chunk), from_keys + from, wanted);
      copy_async(shared_address(values) + Layout::offset(row, chunk), from_values + from, wanted);
    }
  }
};

/// By mma.m16n8k16: the query heads are rows 0 to 7 of A (8 to 15 stay zero), so that K and V are B
/// as they lie in memory, and the weights of the first product are the A of the second. Keys and
/// values are 4 * kDim bytes a slot; the products cost about a tenth of the time to fetch that.
template <class T, int kDim>
class TensorCoreWarp {
 public:
  using Element = T;
  static constexpr int kKeys = 16;
  static constexpr int kHeadSize = kDim;
  static constexpr int kStages = 384 / kDim;  ///< 24 KB of tiles a warp
  using Tile = CacheTile<T, kDim, kKeys>;

  /// `query`: [head of the group, dim].
  __device__ void start(const T* query, int group) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(query + row() * kDim);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      query_[k][0] = row() < group ? words[k * 8 + column() / 2] : 0;
      query_[k][1] = row() < group ? words[k * 8 + column() / 2 + 4] : 0;
    }
    max_ = -INFINITY;
    sum_ = 0;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) out_[n][0] = out_[n][1] = out_[n][2] = out_[n][3] = 0;
  }

  /// Adds the first `valid` >= 1 slots of the tile.
  __device__ void add(const Tile& tile, int valid, float base2_scale) {
    float weight[2][4] = {};
    score(tile, weight);
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[n][i] = n * 8 + column() + i < valid ? weight[n][i] * base2_scale : -INFINITY;
        largest = fmaxf(largest, weight[n][i]);
      }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    raise_max(fmaxf(max_, largest));
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[n][i] = exp2_fast(weight[n][i] - max_);
        sum_ += weight[n][i];
      }
    add_values(tile, weight);
  }

  __device__ void finish(WarpPart<kDim>& part, int group) {
    sum_ += __shfl_xor_sync(~0u, sum_, 1);
    sum_ += __shfl_xor_sync(~0u, sum_, 2);
    if (row() >= group) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      *reinterpret_cast<float2*>(&part.out[row()][n * 8 + column()]) =
          make_float2(out_[n][0], out_[n][1]);
    if (column() != 0) return;
    part.max[row()] = max_;
    part.sum[row()] = sum_;
  }

 private:
  __device__ static int row() { return threadIdx.x % 32 / 4; }
  __device__ static int column() { return threadIdx.x % 4 * 2; }

  __device__ void score(const Tile& tile, float (&logit)[2][4]) const {
    const int lane = threadIdx.x % 32;
    const int slot = lane / 16 * 8 + lane % 8;
    const std::uint32_t keys = shared_address(tile.keys);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t b[4];
      load_matrices(b, keys + Tile::Layout::offset(slot, 2 * k + lane / 8 % 2));
      const std::uint32_t a[4] = {query_[k][0], 0, query_[k][1], 0};
      multiply_add<T>(logit[0], a, b[0], b[1]);
      multiply_add<T>(logit[1], a, b[2], b[3]);
    }
  }

  __device__ void raise_max(float max) {
    if (__any_sync(~0u, max != max_)) {
      const float factor = rescale(max_, max);
      sum_ *= factor;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out_[n][0] *= factor;
        out_[n][1] *= factor;
      }
    }
    max_ = max;
  }

  __device__ void add_values(const Tile& tile, const float (&weight)[2][4]) {
    const int lane = threadIdx.x % 32;
    const int slot = lane / 8 % 2 * 8 + lane % 8;
    const std::uint32_t values = shared_address(tile.values);
    const std::uint32_t a[4] = {pack<T>(weight[0][0], weight[0][1]), 0,
                                pack<T>(weight[1][0], weight[1][1]), 0};
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t b[4];
      load_matrices_transposed(b, values + Tile::Layout::offset(slot, n + lane / 16));
      multiply_add<T>(out_[n], a, b[0], b[1]);
      multiply_add<T>(out_[n + 1], a, b[2], b[3]);
    }
  }

  std::uint32_t query_[kDim / 16][2];
  float out_[kDim / 8][4];  // rows 8 to 15 of it stay zero
  float max_, sum_;         // sum_: over this lane's keys alone, until finish
};

/// In float32: lane l takes key l % 16 for the logits of heads l / 16 * 4 and the next three, and
/// dimensions l, l + 32, … for the values, of all heads.
template <int kDim>
class PlainWarp {
 public:
  using Element = float;
  static constexpr int kKeys = 16;
  static constexpr int kHeadSize = kDim;
  static constexpr int kStages = 2;
  using Tile = CacheTile<float, kDim, kKeys>;

  __device__ void start(const float* query, int group) {
    query_ = query;
    group_ = group;
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      max_[h] = -INFINITY;
      sum_[h] = 0;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) out_[h][i] = 0;
    }
  }

  __device__ void add(const Tile& tile, int valid, float base2_scale) {
    const int lane = threadIdx.x % 32;
    float weight[4];  // of key lane % 16
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane / 16 * 4 + i;
      const float logit = head < group_ ? score(tile, lane % 16, head) * base2_scale : 0;
      weight[i] = lane % 16 < valid ? logit : -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) add_head(tile, weight[h % 4], h);
  }

  __device__ void finish(WarpPart<kDim>& part, int group) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h >= group) break;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) part.out[h][i * 32 + lane] = out_[h][i];
      if (lane != 0) continue;
      part.max[h] = max_[h];
      part.sum[h] = sum_[h];
    }
  }

 private:
  __device__ float score(const Tile& tile, int slot, int head) const {
    const auto* query = reinterpret_cast<const float4*>(query_ + head * kDim);
    const auto* keys = reinterpret_cast<const char*>(tile.keys);
    float dot = 0;
    for (int chunk = 0; chunk < kDim / 4; ++chunk) {
      const float4 q = query[chunk];
      const float4 k = *reinterpret_cast<const float4*>(keys + Tile::Layout::offset(slot, chunk));
      dot = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dot))));
    }
    return dot;
  }

  /// `mine`: this lane's logit of head h or, in the other half of the warp, of another head.
  __device__ void add_head(const Tile& tile, float mine, int h) {
    if (h >= group_) return;
    const int lane = threadIdx.x % 32;
    const float logit = __shfl_sync(~0u, mine, h / 4 * 16 + lane % 16);
    float max = logit;
    for (int step = 8; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    max = fmaxf(max, max_[h]);
    const float weight = exp2_fast(logit - max);
    float sum = weight;
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float factor = rescale(max_[h], max);
    sum_[h] = fmaf(sum_[h], factor, sum);
    max_[h] = max;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) out_[h][i] *= factor;
    for (int slot = 0; slot < kKeys; ++slot) {
      const float w = __shfl_sync(~0u, weight, slot);
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i)
        out_[h][i] = fmaf(w, value(tile, slot, i * 32 + lane), out_[h][i]);
    }
  }
  __device__ static float value(const Tile& tile, int slot, int dim) {
    const auto* values = reinterpret_cast<const char*>(tile.values);
    return *reinterpret_cast<const float*>(values + Tile::Layout::offset(slot, dim / 4) +
                                           dim % 4 * 4);
  }

  const float* query_;
  int group_;
  float out_[kMostGroup][kDim / 32];
  float max_[kMostGroup], sum_[kMostGroup];
};

}  // namespace kvlab::kernels
