// Common code of the two kernels of decode attention: how a CTA of four warps loads tiles, and
// where it stores its results.
#pragma once

#include <algorithm>

#include "kernels/decode/decode_tile.cuh"
#include "kernels/decode/pair_row.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/paged_row.cuh"

namespace kvlab::kernels {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;

/// The arguments, and values derived from them and from the device.
struct PairPlan {
  PairAttention args;
  int ctas;
  float base2_scale;      ///< softmax scale, for base-2 logits
  float* part_out;        // [cta, 2, head of the group, dim], not yet divided by the sum
  float2* part_state;     // [cta, 2, head of the group]: max, sum
  std::int32_t* arrived;  // [cta], zero between launches
  int stages;             ///< tiles of each warp in shared memory
  bool read_once;         ///< keys and values are read once, so they need not stay in the L2 cache
  kvlab_pages paged;      ///< the pages with keys and values; used if kPaged
};

/// The sink logit of a head of a pair, in base 2. It belongs to no token. -infinity if there is
/// none.
__device__ inline float sink_of(const PairAttention& args, int pair, int head) {
  if (args.sinks == nullptr) return -INFINITY;
  return args.sinks[pair % args.table.kv_heads * args.group + head] * kLog2E;
}

/// The start of shared memory: each warp's tiles, and the data for rotating the query or the keys.
template <class Warp>
struct Ring {
  int stages;
  unsigned char* memory;

  __device__ typename Warp::Tile* tiles(int warp) const {
    return reinterpret_cast<typename Warp::Tile*>(memory) + warp * stages;
  }
  __device__ Frequency* frequencies() const { return reinterpret_cast<Frequency*>(tiles(kWarps)); }
  using Query = RotatedQuery<typename Warp::Element, Warp::kHeadSize, Warp::kHeads>;
  __device__ Query& rotated_query() const { return *reinterpret_cast<Query*>(tiles(kWarps)); }

  __host__ __device__ static constexpr std::size_t bytes(int stages) {
    constexpr std::size_t rotating = Warp::kRotated == Rotated::none ? 0
                                     : Warp::kRotated == Rotated::query
                                         ? sizeof(Query)
                                         : Warp::kHeadSize / 2 * sizeof(Frequency);
    static_assert(sizeof(typename Warp::Tile) % 16 == 0 && rotating % 16 == 0);
    return kWarps * static_cast<std::size_t>(stages) * sizeof(typename Warp::Tile) + rotating;
  }
};

/// Data that the warps of a CTA exchange, in shared memory after the ring: their parts of a pair
/// or, while the CTA merges the pair, the weights of all parts. Its size depends on the group.
template <int kDim>
struct Exchange {
  int group;
  float* memory;

  __device__ WarpPart part(int warp) const {
    return {memory + warp * group * kDim,
            reinterpret_cast<float2*>(memory + kWarps * group * kDim) + warp * group};
  }
  /// Number of floats of all parts.
  __host__ __device__ std::size_t parts_floats() const {
    return kWarps * static_cast<std::size_t>(group) * (kDim + 2);
  }
  // [part, head of the group]
  __device__ float* weights() const { return memory; }
  // [thread]; used if the group is so small that several threads compute the same outputs, from
  // different parts
  __device__ float4* outputs() const {
    return reinterpret_cast<float4*>(memory + kMaxCtas * group);
  }
  // [head of the group]: largest logit, sum
  __device__ float2* rows() const {
    return reinterpret_cast<float2*>(memory + kMaxCtas * group + kThreads * 4);
  }
  static std::size_t bytes(int group) {
    const std::size_t parts = Exchange{group, nullptr}.parts_floats();
    const std::size_t merge =
        static_cast<std::size_t>(kMaxCtas + 2) * static_cast<std::size_t>(group) + kThreads * 4;
    return std::max(parts, merge) * sizeof(float);
  }
};

/// The elements at which a warp's next 32 tiles begin, one tile in each lane. So the warp looks up
/// the block table only once for 32 tiles, and each lane divides only once for these tiles.
template <bool kPaged>
struct RowsAhead {};
template <>
struct RowsAhead<true> {
  const kvlab_pages& paged;
  int first = 0;         ///< tile index of lane 0
  std::int64_t row = 0;  ///< element at which tile first + lane begins
};

/// The slots that a warp loads: of every kSlotsPerTile slots, warp w loads kKeys slots, from w *
/// kKeys on. If kPaged, these kKeys slots are in one page.
template <class Warp, bool kPaged>
class TileSource {
 public:
  using T = typename Warp::Element;
  __device__ TileSource(const PairPlan& plan, const TileCursor& cursor, int count)
      : args_(plan.args),
        cursor_(cursor),
        left_(count),
        policy_(cache_policy(plan.read_once)),
        ahead_(ahead_of(plan)) {
    if constexpr (kPaged) look_up();
  }

  /// Starts copying the next tile, if there is one. Commits a group of copies in either case.
  __device__ void start_next(typename Warp::Tile& tile) {
    if (left_ > 0) {
      if (cursor_.tile == cursor_.slots.tiles()) {
        cursor_.next_pair(args_.table, Warp::kHeadSize);
        if constexpr (kPaged) look_up();
      }
      // The newest token is written by the preceding kernel. All other tokens have been written
      // before.
      if (cursor_.slots.newest / kSlotsPerTile == cursor_.tile) wait_for_predecessor();
      const int slot = first_slot();
      const int valid = cursor_.slots.live - slot;
      const std::int64_t from =
          cursor_.slots.base + (valid > 0 ? std::int64_t{slot} * Warp::kHeadSize : 0);
      if constexpr (kPaged) {
        const std::int64_t row = next_row();
        tile.template load_slots<true>(static_cast<const T*>(args_.keys) + row,
                                       static_cast<const T*>(args_.values) + row,
                                       static_cast<int>(ahead_.paged.slot_stride), valid, policy_);
      } else {
        tile.template load_slots<false>(static_cast<const T*>(args_.keys) + from,
                                        static_cast<const T*>(args_.values) + from, 0, valid,
                                        policy_);
      }
      if constexpr (Warp::kRotated == Rotated::keys)
        tile.load(args_.ages + from / Warp::kHeadSize, valid);
      ++cursor_.tile;
      --left_;
    }
    commit_copies();
  }

 private:
  __device__ static RowsAhead<kPaged> ahead_of(const PairPlan& plan) {
    if constexpr (kPaged)
      return {plan.paged};
    else
      return {};
  }
  /// The warp's first slot in the cursor's tile.
  __device__ int first_slot() const {
    return cursor_.tile * kSlotsPerTile + threadIdx.x / 32 * Warp::kKeys;
  }
  /// Looks up 32 tiles, starting with the cursor's tile.
  __device__ void look_up() {
    static_assert(kMinSlotsOfBlock % Warp::kKeys == 0);
    const int slot = first_slot() + static_cast<int>(threadIdx.x % 32) * kSlotsPerTile;
    ahead_.first = cursor_.tile;
    if (slot < cursor_.slots.live)
      ahead_.row = paged_row(ahead_.paged, cursor_.slots.pair, args_.table.kv_heads, slot);
  }
  /// The element at which the cursor's slots begin. It is in an arbitrary page if none of these
  /// slots has a live token. Called by a whole warp.
  __device__ std::int64_t next_row() {
    if (cursor_.tile - ahead_.first == 32) look_up();
    return __shfl_sync(~0u, ahead_.row, cursor_.tile - ahead_.first);
  }

  const PairAttention& args_;
  TileCursor cursor_;
  int left_;
  CachePolicy policy_;
  [[no_unique_address]] RowsAhead<kPaged> ahead_;
};

/// A warp's tiles. Up to kStages - 1 of them are requested ahead. (If kStages were requested at
/// once, launches with many tiles would take about 1 us longer.)
template <class Warp, bool kPaged>
class TilesAhead {
 public:
  static constexpr int kStages = Warp::kStages;
  __device__ static int stages(const PairPlan&) { return kStages; }
  __device__ TilesAhead(const PairPlan& plan, typename Warp::Tile* ring, const TileCursor& cursor,
                        int count)
      : source_(plan, cursor, count), ring_(ring) {
    for (int i = 0; i < kStages - 1; ++i) fetch();
  }
  /// Waits for the next tile and returns it. The tile before it may be overwritten.
  __device__ const typename Warp::Tile& next() {
    if constexpr (kStages == 1) {
      __syncwarp();  // all lanes have read the previous tile
      fetch();
      wait_copies<0>();
      __syncwarp();
      return ring_[0];
    } else {
      return next_of_many();
    }
  }

 private:
  __device__ const typename Warp::Tile& next_of_many() {
    wait_copies<kStages - 2>();
    __syncwarp();
    fetch();
    const auto& tile = ring_[read_];
    read_ = read_ + 1 == kStages ? 0 : read_ + 1;
    return tile;
  }
  __device__ void fetch() {
    source_.start_next(ring_[write_]);
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
  }

  TileSource<Warp, kPaged> source_;
  typename Warp::Tile* ring_;
  int read_ = 0, write_ = 0;
};

/// A warp's tiles, in plan.stages stages that are all requested at once.
template <class Warp, bool kPaged>
class AllTilesAhead {
 public:
  __device__ static int stages(const PairPlan& plan) { return plan.stages; }
  __device__ AllTilesAhead(const PairPlan& plan, typename Warp::Tile* ring,
                           const TileCursor& cursor, int count)
      : source_(plan, cursor, count), ring_(ring), stages_(plan.stages) {
    for (int i = 0; i < stages_; ++i) fetch();
  }
  /// Waits for the next tile and returns it. The previous tile is overwritten.
  __device__ const typename Warp::Tile& next() {
    if (read_ >= 0) {
      __syncwarp();  // all lanes have read the previous tile
      fetch();
    }
    wait_copies<Warp::kMaxStages - 1>(stages_ - 1);
    __syncwarp();
    read_ = read_ + 1 == stages_ ? 0 : read_ + 1;
    return ring_[read_];
  }

 private:
  __device__ void fetch() {
    source_.start_next(ring_[write_]);
    write_ = write_ + 1 == stages_ ? 0 : write_ + 1;
  }

  TileSource<Warp, kPaged> source_;
  typename Warp::Tile* ring_;
  int stages_;
  int read_ = -1, write_ = 0;
};

/// Writes dimensions `dim` to `dim` + 3 of a query head's output.
template <class T>
__device__ void write_output(const PairPlan& plan, int row, int dim, float4 out,
                             float2 max_and_sum) {
  T* const to = static_cast<T*>(plan.args.out) + std::int64_t{row} * plan.args.head_size + dim;
  const float share = 1 / max_and_sum.y;
  to[0] = from_float<T>(out.x * share);
  to[1] = from_float<T>(out.y * share);
  to[2] = from_float<T>(out.z * share);
  to[3] = from_float<T>(out.w * share);
  if (dim == 0 && plan.args.lse != nullptr)
    plan.args.lse[row] = log_sum_exp(max_and_sum.x, max_and_sum.y);
}

}  // namespace kvlab::kernels
