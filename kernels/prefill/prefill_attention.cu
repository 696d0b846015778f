// Causal attention of many queries, in the style of FlashAttention. A row is one query of one query
// head. A CTA keeps a tile of rows in shared memory. It reads the keys that these rows see once, in
// tiles of kKeys keys.
//
// Work: 4 * head_size operations for each (query, query head, visible key). The 2-byte types use
// tensor cores; float32 uses ordinary arithmetic.
//
// Instantiated for 4 head sizes: on tensor cores for 2 types (8 kernels), and in float32 (4
// kernels). Each kernel has four variants: keys and values are contiguous or in pages, and the keys
// are split into parts (prefill_parts.cuh) or not.
#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/prefill/prefill_parts.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = 2;

/// Each warp handles two blocks of 16 rows, so that a key is read from shared memory once for both
/// blocks. Head size 256 is different: a warp handles one block, because the outputs of two blocks
/// would need all registers, and a tile has only 32 keys, because with 64 keys a second CTA would
/// not fit in the shared memory of an SM.
template <int kDim>
struct Tiling {
  static constexpr int kMatrices = kDim > 128 ? 1 : 2;  ///< blocks of 16 rows per warp
  static constexpr int kKeys = kDim > 128 ? 32 : 64;    ///< keys per tile
  static constexpr int kRowsOfWarp = 16 * kMatrices, kRows = kWarps * kRowsOfWarp;
  static constexpr int kPlainRows =
      kDim > 128 ? 8 : 16;  ///< rows per CTA in float32; rows and keys together fit in 48 KiB
};

/// The tile of rows of a CTA. The last rows see the most keys, so they are processed first, for all
/// KV heads. The tiles with few visible keys then run last, so all SMs have work until shortly
/// before the end.
__device__ int tile_of_block(const Plan& plan) {
  return static_cast<int>((gridDim.x - 1 - blockIdx.x) / plan.args.kv_heads);
}
__device__ int kv_head_of_block(const Plan& plan) {
  return static_cast<int>(blockIdx.x % plan.args.kv_heads);
}

__device__ PrefillRows rows_of_block(const Plan& plan) {
  return {plan.args, plan.layer, plan.group, kv_head_of_block(plan), OwnQueries(plan.args)};
}

template <class T, int kDim>
struct alignas(16) Shared {
  using Tiles = Tiling<kDim>;
  T query[Tiles::kRows * kDim];
  T keys[kStages][Tiles::kKeys * kDim];
  T values[kStages][Tiles::kKeys * kDim];
};

constexpr int kSlotsOfSlice = 16;  ///< slots per slice; all of them are in one page
template <int kDim>
constexpr int kSlices = Tiling<kDim>::kKeys / kSlotsOfSlice;
static_assert(kSlotsOfSlice <= kMinSlotsOfBlock);

/// Starts to copy slice number `slice` (kSlotsOfSlice rows) of a tile [slot, dim] to shared memory.
/// Rows of the tile from number `valid` on are filled with zeros. All threads of the CTA call it.
/// `from` points to the first row of the tile or, if kPaged, of the slice. In pages, rows are
/// `stride` elements apart; otherwise they are contiguous.
template <class T, int kDim, bool kPaged>
__device__ void load_slice(T* to, const T* from, int stride, int valid, int slice) {
  using Layout = Swizzled<kDim * sizeof(T)>;
  constexpr int kEach = kSlotsOfSlice * Layout::kChunks;
#pragma unroll
  for (int j = 0; j < kEach; j += kThreads) {
    const int i = slice * kEach + j + threadIdx.x;
    if (kEach % kThreads != 0 && j + static_cast<int>(threadIdx.x) >= kEach) break;
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const int at = kPaged ? (row - slice * kSlotsOfSlice) * stride + chunk * 8 : i * 8;
    copy_async(shared_address(to) + Layout::offset(row, chunk), row < valid ? from + at : from,
               row < valid);
  }
}

/// The index of the first element of a tile's slice in paged memory; 0 if the slice has no valid
/// row. `begin`: slot of the tile's first row.
__device__ inline std::int64_t slice_begin(const kvlab_prefill_args& args, int pair, int begin,
                                           int slice, int valid) {
  const int row = slice * kSlotsOfSlice;
  return row < valid ? paged_row(args, pair, begin + row) : 0;
}

/// The initial maximum of a row that has seen no key and no sink. It is below any logit and finite,
/// so that a row that sees no key of a tile gives weight 0 to all keys of the tile.
constexpr float kNoLogit = -3e38f;

/// Sets the initial maximum and sum of a row. If the layer has sink logits, the maximum is the sink
/// logit of the row's query head, in base 2, and the sum is 1. A sink logit of -infinity, as of a
/// head without a sink, becomes kNoLogit; the first key that the row sees reduces its sum to 0.
__device__ inline void begin_row(const PrefillRows& rows, int row, float& max, float& sum) {
  const float* const sinks = rows.layer.sinks;
  const float sink =
      sinks == nullptr ? -INFINITY : sinks[rows.kv_head * rows.group + row % rows.group] * kLog2E;
  max = sink == -INFINITY ? kNoLogit : sink;
  sum = sinks == nullptr ? 0 : 1;
}

/// A warp's rows, in kMatrices blocks of 16 rows. In block m, lane l holds row m * 16 + l / 4 (half
/// 0) and row m * 16 + l / 4 + 8 (half 1). Four lanes hold the same row, and each of them has a
/// quarter of its columns.
template <class T, int kDim>
class WarpRows {
 public:
  using Layout = Swizzled<kDim * sizeof(T)>;
  static constexpr int kMatrices = Tiling<kDim>::kMatrices, kKeys = Tiling<kDim>::kKeys;

  /// begin(m, half, max, sum) sets the initial state of a row.
  template <class Begin>
  __device__ explicit WarpRows(Begin begin) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        out_[m][n][0] = out_[m][n][1] = out_[m][n][2] = out_[m][n][3] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        begin(m, half, max_[m][half], sum_[m][half]);
        if (lane() % 4 != 0) sum_[m][half] = 0;  // only one of a row's four lanes counts the sink
      }
    }
  }

  /// Adds a tile of keys. A row sees the tile's keys from number hidden(m, half) on (0 or less:
  /// from the first key) and before number visible(m, half) (kKeys or more: to the last key). The
  /// copies of the next tile are issued between the products, by one call of fetch(slice) for each
  /// slice. If all copies were issued together, they would delay the operands of the first
  /// products.
  template <bool kMasked, class Hidden, class Visible, class Fetch>
  __device__ void add(const T* query, const T* keys, const T* values, float base2_scale,
                      Hidden hidden, Visible visible, Fetch fetch) {
    float logit[kMatrices][kKeys / 8][4] = {};
    score(query, keys, logit, fetch);
    if constexpr (kMasked) mask(logit, hidden, visible);
    raise_max(logit, base2_scale);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      std::uint32_t weight[kMatrices][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weight[m][i] = weigh(logit[m][k * 2 + i / 2], m, i % 2, base2_scale);
      add_values(values, k, weight);
    }
  }

  /// Calls write(m, half, n, value, next, inverse) for each row and each n. `value` is column n * 8
  /// + l % 4 * 2 of the output and `next` is the column after it, both not yet divided by the row's
  /// sum; `inverse` is 1 / sum. Then calls row(m, half, largest product, max, sum) once for each
  /// row, in one of the row's four lanes.
  template <class Write, class Row>
  __device__ void finish(Write write, Row row) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[m][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = 1 / sum;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          write(m, half, n, out_[m][n][half * 2], out_[m][n][half * 2 + 1], inverse);
        if (keeps(m, half)) row(m, half, max_product_, max_[m][half], sum);
      }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  /// All four lanes of a row know the row's maximum and sum. Returns whether this lane is the one
  /// that stores them.
  __device__ static bool keeps(int m, int half) { return lane() % 4 == m * 2 + half; }

  template <class Fetch>
  __device__ void score(const T* query, const T* keys, float (&logit)[kMatrices][kKeys / 8][4],
                        Fetch fetch) const {
    const std::uint32_t q = shared_address(query), k = shared_address(keys);
    const int key = lane() / 16 * 8 + lane() % 8;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      static_assert(kDim / 16 >= kSlices<kDim>);
      if (d < kSlices<kDim>) fetch(d);
      std::uint32_t a[kMatrices][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
        load_matrices(a[m], q + Layout::offset(m * 16 + lane() % 16, d * 2 + lane() / 16));
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, k + Layout::offset(n * 8 + key, d * 2 + lane() / 8 % 2));
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          multiply_add<T>(logit[m][n], a[m], b[0], b[1]);
          multiply_add<T>(logit[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  template <class Hidden, class Visible>
  __device__ static void mask(float (&logit)[kMatrices][kKeys / 8][4], Hidden hidden,
                              Visible visible) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int end = visible(m, half) - lane() % 4 * 2, begin = hidden(m, half) - lane() % 4 * 2;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i >= end || n * 8 + i < begin) logit[m][n][half * 2 + i] = -INFINITY;
      }
  }

  /// If the largest logit of the tile exceeds a row's max_ by more than kSlack, sets max_ to this
  /// logit and rescales the row's sum and outputs. A smaller excess is tolerated: weights up to
  /// 2^kSlack do not harm accuracy, and most tiles then need no rescaling. A row's max_ depends
  /// only on the logits of that row. So the bits of a row's result depend neither on the other rows
  /// nor on the number of queries.
  __device__ void raise_max(const float (&logit)[kMatrices][kKeys / 8][4], float base2_scale) {
    float max[kMatrices][2];
    bool raise = false;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          largest = fmaxf(largest, fmaxf(logit[m][n][half * 2], logit[m][n][half * 2 + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (keeps(m, half)) max_product_ = fmaxf(max_product_, largest);
        const float base2 = largest * base2_scale;
        const bool raises = base2 > max_[m][half] + kSlack;
        max[m][half] = raises ? base2 : max_[m][half];
        raise = raise || raises;
      }
    if (!__any_sync(~0u, raise)) return;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = rescale(max_[m][half], max[m][half]);
        max_[m][half] = max[m][half];
        sum_[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out_[m][n][half * 2] *= factor;
          out_[m][n][half * 2 + 1] *= factor;
        }
      }
  }

  /// Returns a row's weights of two neighbouring keys, and adds them to the row's sum.
  __device__ std::uint32_t weigh(const float (&logit)[4], int m, int half, float base2_scale) {
    const float low = exp2_fast(fmaf(logit[half * 2], base2_scale, -max_[m][half]));
    const float high = exp2_fast(fmaf(logit[half * 2 + 1], base2_scale, -max_[m][half]));
    sum_[m][half] += low + high;
    return pack<T>(low, high);
  }

  /// Adds the values of keys k * 16 to k * 16 + 15.
  __device__ void add_values(const T* values, int k, const std::uint32_t (&weight)[kMatrices][4]) {
    const std::uint32_t v = shared_address(values);
    const int key = k * 16 + lane() / 8 % 2 * 8 + lane() % 8;
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t b[4];
      load_matrices_transposed(b, v + Layout::offset(key, n + lane() / 16));
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        multiply_add<T>(out_[m][n], weight[m], b[0], b[1]);
        multiply_add<T>(out_[m][n + 1], weight[m], b[2], b[3]);
      }
    }
  }

  static constexpr float kSlack = 6;
  float out_[kMatrices][kDim / 8][4];
  // sum_ covers only this lane's keys until finish()
  float max_[kMatrices][2], sum_[kMatrices][2];
  /// Largest product of query and key in the row that this lane stores. It is exact, whereas max_
  /// may be lower than the largest logit by up to kSlack.
  float max_product_ = -INFINITY;
};

/// Starts copying the queries of a CTA's rows. Rows after the last one are filled with zeros.
template <class T, int kDim>
__device__ void load_queries(T* to, const PrefillRows& rows, int first_row, int last_row) {
  using Layout = Swizzled<kDim * sizeof(T)>;
  const T* q = static_cast<const T*>(rows.args.q);
  for (int i = threadIdx.x; i < Tiling<kDim>::kRows * Layout::kChunks; i += kThreads) {
    const int row = first_row + i / Layout::kChunks, chunk = i % Layout::kChunks;
    const bool wanted = row <= last_row;
    copy_async(shared_address(to) + Layout::offset(i / Layout::kChunks, chunk),
               q + (wanted ? rows.head(row) * kDim + chunk * 8 : 0), wanted);
  }
}

/// Writes a warp's rows. row_of(m, half) is the row number, within the KV head, of row (m, half) of
/// this lane.
template <bool kParts, class T, int kDim, class RowOf>
__device__ void write_rows(const Plan& plan, const PrefillRows& rows, WarpRows<T, kDim>& warp,
                           RowOf row_of, int last_row) {
  auto* out = static_cast<std::uint32_t*>(plan.args.out);
  const int lane = threadIdx.x % 32;
  warp.finish(
      [&](int m, int half, int n, float value, float next, float inverse) {
        const int row = row_of(m, half), column = n * 4 + lane % 4;
        if (row > last_row) return;
        if constexpr (kParts)
          reinterpret_cast<float2*>(plan.out(rows.head(row), kDim))[column] = {value, next};
        else
          out[rows.head(row) * (kDim / 2) + column] = pack<T>(value * inverse, next * inverse);
      },
      [&](int m, int half, float max_product, float max, float sum) {
        const int row = row_of(m, half);
        if (row <= last_row) plan.write<kParts>(rows.head(row), max_product, max, sum);
      });
}

/// The tensor-core kernel.
template <class T, int kDim, bool kPaged, bool kParts>
__global__ void __launch_bounds__(kThreads, 2) prefill_tiles(const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(memory);
  constexpr int kRows = Tiling<kDim>::kRows, kKeys = Tiling<kDim>::kKeys;
  const auto& args = plan.args;
  const PrefillRows rows = rows_of_block(plan);
  const int first_row = tile_of_block(plan) * kRows;
  if (first_row >= rows.count()) return;  // only a longer sequence has these rows
  const int last_row = min(first_row + kRows, rows.count()) - 1;
  static_assert(kPartKeys % kKeys == 0);
  const int keys_end = plan.keys_end<kParts>(rows.slot(last_row) + 1);
  const int tiles = (keys_end + kKeys - 1) / kKeys;
  const int first_tile = plan.first_key<kParts>(rows.first_seen(first_row)) / kKeys;
  if (first_tile >= tiles) return;  // no row sees this part of the keys
  // Tiles first_whole to unmasked - 1 need no mask, because all rows of the CTA see all their keys.
  const int first_whole = (rows.first_seen(last_row) + kKeys - 1) / kKeys;
  const int unmasked = (rows.slot(first_row) + 1) / kKeys;

  load_queries<T, kDim>(shared.query, rows, first_row, last_row);
  const std::int64_t begin = kPaged ? 0 : rows.begin();
  const T* keys = static_cast<const T*>(args.keys) + begin;
  const T* values = static_cast<const T*>(args.values) + begin;
  const auto fetch = [&](int tile, int slice) {
    std::int64_t from = std::int64_t{min(tile, tiles - 1)} * kKeys * kDim;
    const int valid = keys_end - tile * kKeys;  // 0 or less for a tile after the last one
    if constexpr (kPaged) from = slice_begin(args, rows.pair, tile * kKeys, slice, valid);
    const int stride = static_cast<int>(args.pages.slot_stride);
    load_slice<T, kDim, kPaged>(shared.keys[tile % kStages], keys + from, stride, valid, slice);
    load_slice<T, kDim, kPaged>(shared.values[tile % kStages], values + from, stride, valid, slice);
  };
  for (int slice = 0; slice < kSlices<kDim>; ++slice) fetch(first_tile, slice);
  commit_copies();

  const int warp_row = threadIdx.x / 32 * Tiling<kDim>::kRowsOfWarp;
  const int lane_row = first_row + warp_row + threadIdx.x % 32 / 4;
  const auto row_of = [&](int m, int half) { return lane_row + m * 16 + half * 8; };
  WarpRows<T, kDim> warp(
      [&](int m, int half, float& max, float& sum) { begin_row(rows, row_of(m, half), max, sum); });
  const T* query = shared.query + warp_row * kDim;
  for (int tile = first_tile; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and the previous tile has been read
    const T *tile_keys = shared.keys[tile % kStages], *tile_values = shared.values[tile % kStages];
    const auto visible = [&](int m, int half) {
      return rows.slot(row_of(m, half)) + 1 - tile * kKeys;
    };
    const auto hidden = [&](int m, int half) {
      return rows.first_seen(row_of(m, half)) - tile * kKeys;
    };
    const auto fetch_next = [&](int slice) { fetch(tile + 1, slice); };
    if (kParts && first_row + warp_row > last_row)
      for (int slice = 0; slice < kSlices<kDim>; ++slice)
        fetch_next(slice);  // this warp has no rows
    else if (tile >= first_whole && tile < unmasked)
      warp.template add<false>(query, tile_keys, tile_values, plan.base2_scale, hidden, visible,
                               fetch_next);
    else
      warp.template add<true>(query, tile_keys, tile_values, plan.base2_scale, hidden, visible,
                              fetch_next);
    commit_copies();
  }

  write_rows<kParts>(plan, rows, warp, row_of, last_row);
}

constexpr int kPlainKeys = 32;

template <int kDim, bool kParts>
__device__ void write_plain_row(const Plan& plan, std::int64_t row, const float (&out)[kDim / 32],
                                float max_product, float max, float sum) {
  const int lane = threadIdx.x % 32;
  const float divisor = kParts ? 1 : sum;
  float* const to = kParts ? plan.out(row, kDim) : static_cast<float*>(plan.args.out) + row * kDim;
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) to[i * 32 + lane] = out[i] / divisor;
  if (lane == 0) plan.write<kParts>(row, max_product, max, sum);
}

template <int kDim, int kRows>
__device__ void load_plain_queries(float (&to)[kRows][kDim], const PrefillRows& rows, int first_row,
                                   int last_row) {
  const float* q = static_cast<const float*>(rows.args.q);
  for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
    const int row = first_row + i / kDim;
    to[i / kDim][i % kDim] = row <= last_row ? q[rows.head(row) * kDim + i % kDim] : 0;
  }
}

/// The float32 kernel. A warp handles two or four rows. It computes the logits of 32 keys at a
/// time, one key per lane. For the values, each lane instead holds every 32nd channel of the
/// output.
template <int kDim, bool kPaged, bool kParts>
__global__ void __launch_bounds__(kThreads) prefill_plain(const __grid_constant__ Plan plan) {
  constexpr int kPlainRows = Tiling<kDim>::kPlainRows;
  // keys are padded, so that 32 lanes that read the same column of 32 keys use 32 banks
  __shared__ float query[kPlainRows][kDim], keys[kPlainKeys][kDim + 1];
  const auto& args = plan.args;
  const PrefillRows rows = rows_of_block(plan);
  const int first_row = tile_of_block(plan) * kPlainRows;
  if (first_row >= rows.count()) return;  // only a longer sequence has these rows
  const int last_row = min(first_row + kPlainRows, rows.count()) - 1;
  const int keys_end = plan.keys_end<kParts>(rows.slot(last_row) + 1);
  const int first_key = plan.first_key<kParts>(rows.first_seen(first_row));
  if (first_key >= keys_end) return;  // no row sees this part of the keys
  load_plain_queries(query, rows, first_row, last_row);
  const std::int64_t begin = kPaged ? 0 : rows.begin();
  const float* all_keys = static_cast<const float*>(args.keys) + begin;
  const float* all_values = static_cast<const float*>(args.values) + begin;
  const auto row_at = [&](int slot) {
    return kPaged ? paged_row(args, rows.pair, slot) : std::int64_t{slot} * kDim;
  };
  constexpr int kEach = kPlainRows / kWarps, kOwn = kDim / 32;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kEach;
  float out[kEach][kOwn] = {}, max_product[kEach], max[kEach], sum[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r)
    max_product[r] = -INFINITY, begin_row(rows, first_row + warp_row + r, max[r], sum[r]);
  for (int start = first_key; start < keys_end; start += kPlainKeys) {
    const int there = min(kPlainKeys, keys_end - start);
    __syncthreads();
    for (int i = threadIdx.x; i < there * kDim; i += kThreads)
      keys[i / kDim][i % kDim] = all_keys[row_at(start + i / kDim) + i % kDim];
    __syncthreads();
    float weight[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      float dot = 0;
      if (lane < there)
        for (int d = 0; d < kDim; ++d) dot = fmaf(query[warp_row + r][d], keys[lane][d], dot);
      const int slot = start + lane, row = first_row + warp_row + r;
      const bool seen = lane < there && slot >= rows.first_seen(row) && slot <= rows.slot(row);
      const float logit = seen ? dot * plan.base2_scale : -INFINITY;
      max_product[r] = fmaxf(max_product[r], warp_max(seen ? dot : -INFINITY));
      const float largest = fmaxf(max[r], max_product[r] * plan.base2_scale);
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
      const float* value = all_values + row_at(start + key);
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
    if (row <= last_row)
      write_plain_row<kDim, kParts>(plan, rows.head(row), out[r], max_product[r], max[r], sum[r]);
  }
}

/// The grid: x is the number of tiles of rows of the longest sequence times KV heads, y the number
/// of sequences, z the number of parts.
dim3 grid(const Plan& plan, int rows_of_tile) {
  const int rows = plan.args.queries * plan.group;
  return dim3(static_cast<unsigned>((rows + rows_of_tile - 1) / rows_of_tile) * plan.args.kv_heads,
              static_cast<unsigned>(sequences_of(plan.args)),
              static_cast<unsigned>(parts_of(plan.args)));
}

template <class T, int kDim, bool kPaged, bool kParts>
cudaError_t launch_tiles(const Plan& plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<T, kDim>);
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  if (kBytes > static_cast<std::size_t>(limits.shared_bytes))
    return cudaErrorNotSupported;  // why_not_prefill() returns the reason
  const auto kernel = prefill_tiles<T, kDim, kPaged, kParts>;
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<grid(plan, Tiling<kDim>::kRows), kThreads, kBytes, stream>>>(plan);
  return merge_parts<T, kDim>(plan, stream);
}

template <int kDim, bool kPaged, bool kParts>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  switch (plan.args.type) {
    case KVLAB_BF16:
      return launch_tiles<__nv_bfloat16, kDim, kPaged, kParts>(plan, stream);
    case KVLAB_F16:
      return launch_tiles<__half, kDim, kPaged, kParts>(plan, stream);
    case KVLAB_F32:
      break;
  }
  prefill_plain<kDim, kPaged, kParts>
      <<<grid(plan, Tiling<kDim>::kPlainRows), kThreads, 0, stream>>>(plan);
  return merge_parts<float, kDim>(plan, stream);
}

template <int kDim, bool kPaged>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  return plan.args.workspace != nullptr ? launch<kDim, kPaged, true>(plan, stream)
                                        : launch<kDim, kPaged, false>(plan, stream);
}

template <int kDim>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  return plan.args.pages.blocks != nullptr ? launch<kDim, true>(plan, stream)
                                           : launch<kDim, false>(plan, stream);
}

bool is_aligned(const void* pointer) { return pointer != nullptr && aligned16(pointer); }

}  // namespace

LaunchPlan prefill_plan(Type type, int head_size, const DeviceLimits& limits) {
  if (type == KVLAB_F32) return {.blocks = 1};
  const std::size_t bytes = head_size == 64    ? sizeof(Shared<__half, 64>)
                            : head_size == 96  ? sizeof(Shared<__half, 96>)
                            : head_size == 128 ? sizeof(Shared<__half, 128>)
                                               : sizeof(Shared<__half, 256>);
  return {.blocks = bytes <= static_cast<std::size_t>(limits.shared_bytes) ? 1 : 0,
          .stages = kStages,
          .shared_bytes = bytes};
}

std::size_t prefill_workspace(const kvlab_prefill_args& args) {
  const std::int64_t parts = (std::int64_t{args.keys_end} + kPartKeys - 1) / kPartKeys;
  return static_cast<std::size_t>(rows_of(args) * parts) *
         (sizeof(RowPart) + static_cast<std::size_t>(args.head_size) * sizeof(float));
}

cudaError_t prefill_attention(const kvlab_prefill_args& args, const PrefillLayer& layer,
                              cudaStream_t stream) {
  constexpr int kMaxParts = 65535;  // limit of the grid's third dimension
  if (args.workspace != nullptr &&
      (args.keys_end < 1 || parts_of(args) > kMaxParts || layer.window != 0 ||
       layer.sinks != nullptr || !is_aligned(args.workspace)))
    return cudaErrorInvalidValue;
  if (!can_prefill(args) || layer.window < 0 ||
      layer.head_stride * static_cast<std::int64_t>(bytes_of(args.type)) % 16 != 0 ||
      !is_aligned(args.q) || !is_aligned(args.keys) || !is_aligned(args.values) ||
      !is_aligned(args.out))
    return cudaErrorInvalidValue;
  const Plan plan{.args = args,
                  .layer = layer,
                  .group = args.query_heads / args.kv_heads,
                  .base2_scale = args.softmax_scale * kLog2E,
                  .rows = rows_of(args)};
  switch (args.head_size) {
    case 64:
      return launch<64>(plan, stream);
    case 96:
      return launch<96>(plan, stream);
    case 128:
      return launch<128>(plan, stream);
    default:
      return launch<256>(plan, stream);
  }
}

cudaError_t prefill_attention(const AttentionShape& shape, kvlab_prefill_args args, int window,
                              cudaStream_t stream) {
  args.type = shape.type;
  args.query_heads = shape.query_heads;
  args.kv_heads = shape.kv_heads;
  args.head_size = shape.head_size;
  args.softmax_scale = shape.softmax_scale;
  return prefill_attention(
      args, {.head_stride = shape.head_stride, .sinks = shape.sinks, .window = window}, stream);
}

}  // namespace kvlab::kernels
