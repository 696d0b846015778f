// How one warp processes a tile of cached keys and values for the query heads of one KV head: on
// tensor cores (2-byte types) or in float32. Both variants keep the running softmax in registers.
//
// A tile is kKeys consecutive slots of one KV head, with keys and values [slot, dim], in shared
// memory. If keys have to be rotated to cache positions, the tile holds them before the rotation,
// and also holds their ages.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/device/element.cuh"
#include "kernels/device/key_angles.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"

namespace kvlab::kernels {

/// The way in which cache positions are applied while a tile is read.
enum class Rotated {
  none,
  query,  ///< the query is rotated for the sinks; see EvictingAttentionArgs
  keys,   ///< each key is rotated by its age
};

/// A warp's result over its keys, for each query head of the group.
struct WarpPart {
  float* out;     // [head, dim], in shared memory
  float2* state;  // [head]: max, sum
};

template <int kKeys, Rotated kRotated>
struct TileAges {};
template <int kKeys>
struct TileAges<kKeys, Rotated::keys> {
  std::uint32_t ages[kKeys];  // see kvlab_cache_view

  /// Starts copying the ages of the first `valid` slots. Called by a whole warp.
  __device__ void load(const std::uint32_t* from, int valid) {
    const int lane = threadIdx.x % 32;
    if (lane < kKeys && lane < valid) copy_word_async(shared_address(ages + lane), from + lane);
  }
};

/// Parameters of a tile, in addition to its contents.
struct TileUse {
  int valid;      ///< number of slots to attend to, from the first one on; at least 1
  float* logits;  ///< where to store the logits, [slot, logits_stride]; may be null
  int logits_stride;
  KeyAngles angles;  ///< for cache positions; its `newest` is relative to the tile's first slot
  int sinks;  ///< Rotated::query: number of slots, from the first one on, that use the rotated
              ///< query
  const void* rotated_query;  // RotatedQuery, in shared memory
};

/// The group's queries, rotated for the sinks. Stores the rounded numbers and their rounding
/// errors.
template <class T, int kDim, int kHeads>
struct RotatedQuery {
  /// padded to avoid bank conflicts
  static constexpr int kStride = kDim + 16 / sizeof(T);
  T values[kHeads * kStride];
  T rests[kHeads * kStride];

  __device__ void set(int head, int dim, float value) {
    const T kept = from_float<T>(value);
    values[head * kStride + dim] = kept;
    rests[head * kStride + dim] = from_float<T>(value - to_float(kept));
  }
};

/// One tile in shared memory.
template <class T, int kDim, int kKeys, Rotated kRotated>
struct alignas(16) CacheTile : TileAges<kKeys, kRotated> {
  using Layout = Swizzled<kDim * sizeof(T)>;
  alignas(16) T keys[kKeys * kDim];
  T values[kKeys * kDim];

  /// Starts copying the first `valid` slots from `from_keys` and `from_values`. Source slots are
  /// consecutive or, if kStrided, `stride` elements apart. The rest of the tile is filled with
  /// zeros, because an unused slot may hold NaN. Called by a whole warp.
  template <bool kStrided>
  __device__ void load_slots(const T* from_keys, const T* from_values, int stride, int valid,
                             CachePolicy policy) {
    const int lane = threadIdx.x % 32;
    constexpr int kPerChunk = 16 / sizeof(T);
#pragma unroll
    for (int i = lane; i < kKeys * Layout::kChunks; i += 32) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const bool wanted = row < valid;
      const int from = kStrided ? row * stride + chunk * kPerChunk : wanted ? i * kPerChunk : 0;
      copy_async(shared_address(keys) + Layout::offset(row, chunk), from_keys + from, wanted,
                 policy);
      copy_async(shared_address(values) + Layout::offset(row, chunk), from_values + from, wanted,
                 policy);
    }
  }
};

/// Computes on tensor cores with mma.m16n8k16. The first product computes logits: its 16 rows are
/// keys, and its 8 columns are query heads. The second product computes the weighted sum of the
/// values: its 16 rows are dimensions of the values, and its 8 columns are the same query heads. So
/// keys and values are operand A, in the layout that they have in memory. The weights that result
/// from the first product become operand B of the second. For this, the lanes of the warp transpose
/// them. Keys and values take 4 * kDim bytes per slot, and loading them takes about twenty times as
/// long as the products.
///
/// With Rotated::keys, each element of a rotated key becomes two elements, its rounded value and
/// the rounding error, so that products have 16 bits of precision in bf16 and 22 bits in fp16. The
/// query is then not rotated, because a logit depends only on the distance between key and query.
/// With Rotated::query, each element of the rotated query becomes two elements in the same way.
///
/// With more than eight heads, each group of eight has separate products, but a tile in shared
/// memory is read only once for both groups.
template <class T, int kDim, Rotated kRotated_, int kHeads_>
class TensorCoreWarp {
 public:
  using Element = T;
  static constexpr int kKeys = 16;
  static constexpr int kHeadSize = kDim, kHeads = kHeads_;
  /// Number of stages: tiles of a warp in shared memory. They take 16 KiB per warp. At head size
  /// 256, 16 KiB would be only one stage. There are two stages in that case, with one CTA per
  /// multiprocessor, so as many bytes are in flight as with two CTAs at head size 128.
  static constexpr int kStages = kDim > 128 ? 2 : 256 / kDim;
  /// Number of stages that take 24 KiB per warp. Used in launches that are long or very short.
  static constexpr int kMaxStages = kDim > 128 ? 2 : 384 / kDim;
  static constexpr Rotated kRotated = kRotated_;
  using Tile = CacheTile<T, kDim, kKeys, kRotated>;

  /// `query`: [head of the group, dim].
  __device__ void start(const T* query, int group) {
    group_ = group;
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const bool there = e * 8 + row() < group;
      const auto* words = reinterpret_cast<const std::uint32_t*>(query + (e * 8 + row()) * kDim);
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        query_[e][k][0] = there ? words[k * 8 + column() / 2] : 0;
        query_[e][k][1] = there ? words[k * 8 + column() / 2 + 4] : 0;
      }
      max_[e] = make_float2(-INFINITY, -INFINITY);
      sum_[e] = make_float2(0, 0);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
        out_[e][n][0] = out_[e][n][1] = out_[e][n][2] = out_[e][n][3] = 0;
    }
  }

  /// Starts the softmax of each head of the group with the head's sink logit, which belongs to no
  /// key.
  __device__ void count_sinks(const float* sinks) {
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = e * 8 + column() + i;
        if (head >= group_) continue;
        (i == 0 ? max_[e].x : max_[e].y) = sinks[head] * kLog2E;
        if (row() == 0) (i == 0 ? sum_[e].x : sum_[e].y) = 1;
      }
  }

  __device__ void add(const Tile& tile, const TileUse& use, float base2_scale) {
    float weights[kEights][4];
    if constexpr (kRotated == Rotated::keys)
      score_rotated(tile, use.angles, weights);
    else
      score(tile, weights);
    if constexpr (kRotated == Rotated::query)
      if (use.sinks > 0) score_sinks(tile, use, weights);
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      auto& weight = weights[e];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weight[i] = i / 2 * 8 + row() < use.valid ? weight[i] * base2_scale : -INFINITY;
      if (use.logits != nullptr) store_logits(weight, e, use);
      raise_max(e, make_float2(fmaxf(weight[0], weight[2]), fmaxf(weight[1], weight[3])));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weight[i] = exp2_fast(weight[i] - (i % 2 ? max_[e].y : max_[e].x));
      sum_[e].x += weight[0] + weight[2];
      sum_[e].y += weight[1] + weight[3];
    }
    add_values(tile, weights);
  }

  __device__ void finish(const WarpPart& part) {
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      float2& sum = sum_[e];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
        sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = e * 8 + column() + i;
        if (head >= group_) break;
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            part.out[head * kDim + n * 16 + half * 8 + row()] = out_[e][n][half * 2 + i];
        if (row() == 0)
          part.state[head] = i == 0 ? make_float2(max_[e].x, sum.x) : make_float2(max_[e].y, sum.y);
      }
    }
  }

 protected:
  static constexpr int kEights = kHeads / 8;  ///< groups of eight heads
  // Of a product's result, a lane holds four numbers: those of rows (keys or dimensions) row() and
  // row() + 8, for heads column() and column() + 1.
  __device__ static int row() { return threadIdx.x % 32 / 4; }
  __device__ static int column() { return threadIdx.x % 4 * 2; }

  /// There are two sums for each group of eight heads, so that consecutive products do not wait for
  /// each other.
  using Sums = float[kEights][2][4];
  __device__ static void add_up(const Sums& sums, float (&logit)[kEights][4]) {
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) logit[e][i] = sums[e][0][i] + sums[e][1][i];
  }

  __device__ void score(const Tile& tile, float (&logit)[kEights][4]) const {
    const int lane = threadIdx.x % 32;
    const std::uint32_t keys = shared_address(tile.keys);
    Sums sums = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[4];
      load_matrices(a, keys + Tile::Layout::offset(lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int e = 0; e < kEights; ++e)
        multiply_add<T>(sums[e][k % 2], a, query_[e][k][0], query_[e][k][1]);
    }
    add_up(sums, logit);
  }

  /// Computes the sinks' logits again, with the query rotated to its cache position.
  __device__ void score_sinks(const Tile& tile, const TileUse& use,
                              float (&logit)[kEights][4]) const {
    using Query = RotatedQuery<T, kDim, kHeads>;
    const auto& query = *static_cast<const Query*>(use.rotated_query);
    const auto words = [&](const T* rows, int e, int k, int i) {
      const int head = e * 8 + row(), at = head * Query::kStride + k * 16 + i * 8 + column();
      return head < group_ ? *reinterpret_cast<const std::uint32_t*>(rows + at) : 0;
    };
    const int lane = threadIdx.x % 32;
    const std::uint32_t keys = shared_address(tile.keys);
    Sums sums = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[4];
      load_matrices(a, keys + Tile::Layout::offset(lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        multiply_add<T>(sums[e][0], a, words(query.values, e, k, 0), words(query.values, e, k, 1));
        multiply_add<T>(sums[e][1], a, words(query.rests, e, k, 0), words(query.rests, e, k, 1));
      }
    }
    float sink_logits[kEights][4];
    add_up(sums, sink_logits);
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i / 2 * 8 + row() < use.sinks) logit[e][i] = sink_logits[e][i];
  }

  /// Computes logits of keys that are rotated after they are read from shared memory. A lane reads
  /// dimension i and dimension i + kDim / 2 of the same key, because the rotation combines these
  /// two.
  __device__ void score_rotated(const Tile& tile, const KeyAngles& angles,
                                float (&logit)[kEights][4]) const {
    const int lane = threadIdx.x % 32;
    const std::uint32_t keys = shared_address(tile.keys);
    const std::uint32_t distance[2] = {angles.distance(tile.ages, row()),
                                       angles.distance(tile.ages, row() + 8)};
    Sums sums = {};
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      std::uint32_t low[4], high[4], rest[4], rest_high[4];
      load_matrices(low, keys + Tile::Layout::offset(lane % 16, 2 * k + lane / 16));
      load_matrices(high, keys + Tile::Layout::offset(lane % 16, 2 * k + kDim / 16 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4;
           ++i) {  // word i: key i % 2 * 8 + row(), two dimensions from i / 2 * 8 + column() on
        const auto cos_sin = [&](int next) {
          return angles.cos_sin(k * 16 + i / 2 * 8 + column() + next, distance[i % 2]);
        };
        rotate<T>(cos_sin(0), cos_sin(1), low[i], high[i], rest[i], rest_high[i]);
      }
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const auto &query = query_[e][k], &query_high = query_[e][k + kDim / 32];
        multiply_add<T>(sums[e][0], low, query[0], query[1]);
        multiply_add<T>(sums[e][1], high, query_high[0], query_high[1]);
        multiply_add<T>(sums[e][0], rest, query[0], query[1]);
        multiply_add<T>(sums[e][1], rest_high, query_high[0], query_high[1]);
      }
    }
    add_up(sums, logit);
  }

  __device__ void store_logits(const float (&logit)[4], int e, const TileUse& use) const {
    const int head = e * 8 + column();
    if (head >= group_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = use.logits + (half * 8 + row()) * use.logits_stride + head;
      if (use.logits_stride == 1)
        *to = logit[half * 2];
      else
        *reinterpret_cast<float2*>(to) = make_float2(logit[half * 2], logit[half * 2 + 1]);
    }
  }

  /// Raises the maxima of head group `e` to those over all keys so far, and rescales the sums and
  /// outputs. Does nothing if no lane has a larger logit. `largest`: the largest logits of this
  /// lane's keys, for its two heads.
  __device__ void raise_max(int e, float2 largest) {
    float2 &max = max_[e], &sum = sum_[e];
    if (!__any_sync(~0u, largest.x > max.x || largest.y > max.y)) return;
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, lanes));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, lanes));
    }
    largest = make_float2(fmaxf(largest.x, max.x), fmaxf(largest.y, max.y));
    const float2 factor = make_float2(rescale(max.x, largest.x), rescale(max.y, largest.y));
    sum = make_float2(sum.x * factor.x, sum.y * factor.y);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[e][n][i] *= i % 2 ? factor.y : factor.x;
    max = largest;
  }

  __device__ void add_values(const Tile& tile, const float (&weight)[kEights][4]) {
    const int lane = threadIdx.x % 32;
    const int slot = lane / 16 * 8 + lane % 8;
    const std::uint32_t values = shared_address(tile.values);
    std::uint32_t b[kEights][2];
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[e][half] = transpose_matrix(pack<T>(weight[e][half * 2], weight[e][half * 2 + 1]));
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t a[4];
      load_matrices_transposed(a, values + Tile::Layout::offset(slot, 2 * n + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < kEights; ++e) multiply_add<T>(out_[e][n], a, b[e][0], b[e][1]);
    }
  }

  std::uint32_t query_[kEights][kDim / 16][2];
  float out_[kEights][kDim / 16][4];
  // max_ and sum_ are for two heads of each group of eight. sum_ covers only this lane's keys until
  // finish().
  float2 max_[kEights], sum_[kEights];
  int group_;
};

/// Computes in float32. For the logits, lane l handles key l % 16 and, of every eight heads, heads
/// l / 16 * 4 to l / 16 * 4 + 3. For the values, it handles dimensions l, l + 32, … of all heads.
template <int kDim, Rotated kRotated_, int kHeads_>
class PlainWarp {
 public:
  using Element = float;
  static constexpr int kKeys = 16;
  static constexpr int kHeadSize = kDim, kHeads = kHeads_;
  /// Two stages of head size 256 do not fit in shared memory.
  static constexpr int kStages = kDim > 128 ? 1 : 2;
  static constexpr int kMaxStages = kStages;
  static constexpr Rotated kRotated = kRotated_;
  using Tile = CacheTile<float, kDim, kKeys, kRotated>;

  __device__ void start(const float* query, int group) {
    query_ = query;
    group_ = group;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      max_[h] = -INFINITY;
      sum_[h] = 0;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) out_[h][i] = 0;
    }
  }

  __device__ void count_sinks(const float* sinks) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < group_) max_[h] = sinks[h] * kLog2E, sum_[h] = 1;
  }

  __device__ void add(const Tile& tile, const TileUse& use, float base2_scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kHeads; first += 8) {
      float weight[4];  // weights of key lane % 16
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = first + lane / 16 * 4 + i;
        float logit = 0;
        if (head < group_) logit = score_one(tile, use, lane % 16, head) * base2_scale;
        weight[i] = lane % 16 < use.valid ? logit : -INFINITY;
        if (use.logits != nullptr && head < group_)
          use.logits[lane % 16 * use.logits_stride + head] = weight[i];
      }
#pragma unroll
      for (int h = 0; h < 8; ++h) add_head(tile, weight[h % 4], first + h);
    }
  }

  __device__ void finish(const WarpPart& part) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= group_) break;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) part.out[h * kDim + i * 32 + lane] = out_[h][i];
      if (lane == 0) part.state[h] = make_float2(max_[h], sum_[h]);
    }
  }

 private:
  __device__ float score_one(const Tile& tile, const TileUse& use, int slot, int head) const {
    if constexpr (kRotated == Rotated::keys) return score_rotated(tile, use.angles, slot, head);
    const float* query = query_ + head * kDim;
    if constexpr (kRotated == Rotated::query) {
      using Query = RotatedQuery<float, kDim, kHeads>;
      if (slot < use.sinks)
        query = static_cast<const Query*>(use.rotated_query)->values + head * Query::kStride;
    }
    return score(tile, slot, query);
  }

  __device__ float score(const Tile& tile, int slot, const float* with) const {
    const auto* query = reinterpret_cast<const float4*>(with);
    const auto* keys = reinterpret_cast<const char*>(tile.keys);
    float dot = 0;
    for (int chunk = 0; chunk < kDim / 4; ++chunk) {
      const float4 q = query[chunk];
      const float4 k = *reinterpret_cast<const float4*>(keys + Tile::Layout::offset(slot, chunk));
      dot = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dot))));
    }
    return dot;
  }

  __device__ float score_rotated(const Tile& tile, const KeyAngles& angles, int slot,
                                 int head) const {
    const float* query = query_ + head * kDim;
    const std::uint32_t distance = angles.distance(tile.ages, slot);
    float dot = 0;
    for (int i = 0; i < kDim / 2; ++i) {
      const float2 cos_sin = angles.cos_sin_precise(i, distance);
      const float low = element(tile.keys, slot, i), high = element(tile.keys, slot, i + kDim / 2);
      dot = fmaf(query[i], fmaf(low, cos_sin.x, -high * cos_sin.y), dot);
      dot = fmaf(query[i + kDim / 2], fmaf(high, cos_sin.x, low * cos_sin.y), dot);
    }
    return dot;
  }

  /// Adds the tile to the softmax and the output of head h. `mine`: this lane's logit. In one half
  /// of the warp it belongs to head h, in the other half to another head.
  __device__ void add_head(const Tile& tile, float mine, int h) {
    if (h >= group_) return;
    const int lane = threadIdx.x % 32;
    const float logit = __shfl_sync(~0u, mine, h / 4 % 2 * 16 + lane % 16);
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
        out_[h][i] = fmaf(w, element(tile.values, slot, i * 32 + lane), out_[h][i]);
    }
  }
  __device__ static float element(const float* slots, int slot, int dim) {
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(slots) +
                                           Tile::Layout::offset(slot, dim / 4) + dim % 4 * 4);
  }

  const float* query_;
  int group_;
  float out_[kHeads][kDim / 32];
  float max_[kHeads], sum_[kHeads];
};

}  // namespace kvlab::kernels
