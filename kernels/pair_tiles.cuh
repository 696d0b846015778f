// What the two kernels of decode attention share: how a CTA of four warps fetches tiles, and where
// its results go.
#pragma once

#include <algorithm>

#include "kernels/decode_tile.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/pair_row.cuh"

namespace kvlab::kernels {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;

/// The arguments, and what follows from them and from the device.
struct PairPlan {
  PairAttention args;
  int ctas;
  int stages;             ///< tiles of each warp in shared memory
  float base2_scale;      ///< softmax scale, for base-2 logits
  float* part_out;        // [cta, 2, head of the group, dim], not yet divided by the sum
  float2* part_state;     // [cta, 2, head of the group]: max, sum
  std::int32_t* arrived;  // [cta], zero between launches
};

/// Begins shared memory: each warp's tiles, and the frequencies by which keys are turned.
template <class Warp>
struct Ring {
  int stages;
  unsigned char* memory;

  __device__ typename Warp::Tile* tiles(int warp) const {
    return reinterpret_cast<typename Warp::Tile*>(memory) + warp * stages;
  }
  __device__ Frequency* frequencies() const { return reinterpret_cast<Frequency*>(tiles(kWarps)); }
  __host__ __device__ static constexpr std::size_t bytes(int stages) {
    constexpr std::size_t turned = Warp::kSqueezed ? Warp::kHeadSize / 2 * sizeof(Frequency) : 0;
    static_assert(sizeof(typename Warp::Tile) % 16 == 0 && turned % 16 == 0);
    return kWarps * static_cast<std::size_t>(stages) * sizeof(typename Warp::Tile) + turned;
  }
};

/// What the warps of a CTA tell each other, behind the ring in shared memory: their parts of a
/// pair, or what all parts of a pair weigh while the CTA merges it. As large as the group needs.
template <int kDim>
struct Exchange {
  int group;
  float* memory;

  __device__ WarpPart part(int warp) const {
    return {memory + warp * group * kDim,
            reinterpret_cast<float2*>(memory + kWarps * group * kDim) + warp * group};
  }
  /// Floats of all parts.
  __host__ __device__ std::size_t parts_floats() const {
    return kWarps * static_cast<std::size_t>(group) * (kDim + 2);
  }
  // [part, head of the group]
  __device__ float* weights() const { return memory; }
  // [thread]; where the group leaves threads for several rows
  __device__ float4* outputs() const {
    return reinterpret_cast<float4*>(memory + kMostCtas * group);
  }
  // [head of the group]: largest logit, sum
  __device__ float2* rows() const {
    return reinterpret_cast<float2*>(memory + kMostCtas * group + kThreads * 4);
  }
  static std::size_t bytes(int group) {
    const std::size_t parts = Exchange{group, nullptr}.parts_floats();
    const std::size_t merge =
        static_cast<std::size_t>(kMostCtas + 2) * static_cast<std::size_t>(group) + kThreads * 4;
    return std::max(parts, merge) * sizeof(float);
  }
};

/// A warp's tiles, fetched ahead. Every kSlotsPerTile slots, warp w takes those from w * kKeys on.
template <class Warp>
class Fetcher {
 public:
  using T = typename Warp::Element;
  __device__ Fetcher(const PairPlan& plan, typename Warp::Tile* ring, const Place& place, int count)
      : args_(plan.args), ring_(ring), stages_(plan.stages), place_(place), left_(count) {
    for (int i = 0; i < stages_; ++i) fetch();
  }
  /// The next tile, once it is there; the one before it is overwritten.
  __device__ const typename Warp::Tile& next() {
    if (read_ >= 0) {
      __syncwarp();  // all have read it
      fetch();
    }
    wait_copies<Warp::kMostStages - 1>(stages_ - 1);
    __syncwarp();
    read_ = read_ + 1 == stages_ ? 0 : read_ + 1;
    return ring_[read_];
  }

 private:
  __device__ void fetch() {
    if (left_ > 0) {
      if (place_.tile == place_.slots.tiles()) place_.next_pair(args_.table, Warp::kHeadSize);
      const int slot = place_.tile * kSlotsPerTile + threadIdx.x / 32 * Warp::kKeys;
      const int valid = place_.slots.live - slot;
      const std::int64_t from =
          place_.slots.base + (valid > 0 ? std::int64_t{slot} * Warp::kHeadSize : 0);
      const T* const keys = static_cast<const T*>(args_.keys) + from;
      const T* const values = static_cast<const T*>(args_.values) + from;
      // The newest token comes from the kernel before; the rest has been there.
      if (place_.slots.newest / kSlotsPerTile == place_.tile) {
        prefetch_slots(keys, valid);
        prefetch_slots(values, valid);
        wait_for_predecessor();
      }
      auto& tile = ring_[write_];
      tile.load_slots(keys, values, valid);
      if constexpr (Warp::kSqueezed) tile.load(args_.ages + from / Warp::kHeadSize, valid);
      write_ = write_ + 1 == stages_ ? 0 : write_ + 1;
      ++place_.tile;
      --left_;
    }
    commit_copies();
  }
  /// To the L2 cache, where what is still to be written will be too.
  __device__ static void prefetch_slots(const T* from, int valid) {
    constexpr int kLine = 128;
    const int bytes = min(valid, Warp::kKeys) * Warp::kHeadSize * static_cast<int>(sizeof(T));
    for (int at = static_cast<int>(threadIdx.x) % 32 * kLine; at < bytes; at += 32 * kLine)
      prefetch_line(reinterpret_cast<const char*>(from) + at);
  }

  const PairAttention& args_;
  typename Warp::Tile* ring_;
  int stages_;
  Place place_;
  int left_;
  int read_ = -1, write_ = 0;
};

/// `dim` and the next three of a query head's output.
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
