// Plans the launch of decode attention. The plan is a pure function of the shape and of a GPU's
// limits. The class of a warp determines how much memory it uses, so this code, like the kernels,
// is compiled for each class.
//
// On a GPU with less shared memory than an H100, a CTA requests fewer tiles in advance. If not even
// one tile per warp fits, there is no plan.
#pragma once

#include <algorithm>

#include "kernels/decode/pair_tiles.cuh"
#include "kernels/launch_plans.hpp"

namespace kvlab::kernels {

inline constexpr int kClusterCtas = 8;  ///< cluster size that every sm_90 device supports
inline constexpr int kClusterParts = kClusterCtas * kWarps;

/// Whether there is a kernel whose number of stages is chosen at run time, in addition to the
/// kernel that is compiled for Warp::kStages stages.
template <class Warp>
inline constexpr bool kVariesStages = Warp::kRotated == Rotated::none&& Warp::kHeads == 8;

template <class Warp>
std::size_t shared_bytes(const PairAttention& args, int stages) {
  return Ring<Warp>::bytes(stages) + Exchange<Warp::kHeadSize>::bytes(args.group);
}

/// The largest number of stages that fits, up to `wanted`; 0 if none fits.
template <class Warp>
int stages_that_fit(const DeviceLimits& limits, const PairAttention& args, int wanted) {
  const int min_stages = kVariesStages<Warp> ? 1 : Warp::kStages;
  const auto max_bytes = static_cast<std::size_t>(limits.shared_bytes);
  while (wanted >= min_stages && shared_bytes<Warp>(args, wanted) > max_bytes) --wanted;
  return wanted >= min_stages ? wanted : 0;
}

/// The number of tiles if all lengths have their maximum.
inline std::int64_t max_tiles(const PairAttention& args) {
  return std::int64_t{args.table.pairs} * (row_slots(args.table.max_slots) / kSlotsPerTile);
}

// Bytes of shared memory that the system reserves for each CTA.
inline constexpr int kReserved = 1024;
/// Shared memory of a multiprocessor: the maximum for one CTA, plus the part that is reserved for
/// it.
inline int shared_of_all(const DeviceLimits& limits) { return limits.shared_bytes + kReserved; }

/// The number of CTAs: two per multiprocessor, which keep enough bytes in flight, but at most the
/// maximum number of tiles. 0 if a multiprocessor cannot hold one CTA.
template <class Warp>
int max_ctas(const DeviceLimits& limits, const PairAttention& args) {
  const int stages = stages_that_fit<Warp>(limits, args, Warp::kStages);
  if (stages == 0) return 0;
  const int bytes = static_cast<int>(shared_bytes<Warp>(args, stages));
  const int on_one = shared_of_all(limits) / (bytes + kReserved);
  return static_cast<int>(std::min<std::int64_t>(
      {max_tiles(args), std::min(on_one, 2) * limits.multiprocessors, kMaxCtas}));
}

struct PairGrid {
  int ctas, stages;
  bool all_ahead;  ///< all stages are requested at once
};

/// Rounds the number of CTAs down to a multiple of the number of pairs, so that pairs of equal
/// length do not share a CTA. A CTA with parts of two pairs would have to wait, write and merge
/// twice. The number is not rounded if that would drop more than an eighth of the CTAs, or if each
/// pair has at least kFew CTAs, because then few of them have parts of two pairs.
inline int for_whole_pairs(int ctas, int pairs) {
  constexpr int kFew = 16;  // at most one in kFew CTAs may have parts of two pairs
  const int out = ctas % pairs;
  return pairs <= ctas && ctas < kFew * pairs && out <= ctas / 8 ? ctas - out : ctas;
}

template <class Warp>
PairGrid grid_for(const DeviceLimits& limits, const PairAttention& args) {
  constexpr int kShort = 4, kLong = 16;  // tiles per CTA
  const auto fitting = [&](int wanted) { return stages_that_fit<Warp>(limits, args, wanted); };
  const int usual = fitting(Warp::kStages);
  PairGrid grid{
      .ctas = max_ctas<Warp>(limits, args), .stages = usual, .all_ahead = usual != Warp::kStages};
  if (!kVariesStages<Warp> || usual == 0) return grid;
  if (max_tiles(args) <= kShort * limits.multiprocessors) {
    // One CTA per multiprocessor leaves shared memory for one CTA of the next kernel, so the next
    // kernel can already load its data. When the query arrives, all tiles of a share, or most of
    // them, have been requested.
    grid.ctas = std::min(grid.ctas, limits.multiprocessors);
    grid.stages = max_tiles(args) <= 2 * limits.multiprocessors ? usual : fitting(Warp::kMaxStages);
    grid.all_ahead = true;
  } else if (Warp::kHeadSize == 64 && max_tiles(args) >= kLong * grid.ctas) {
    grid.stages = fitting(Warp::kMaxStages);  // at head size 128 more stages do not help
    grid.all_ahead = true;
  }
  return grid;
}

/// Shared memory of a CTA. It is large enough that a third CTA does not fit on a multiprocessor.
/// Otherwise some multiprocessors would get three CTAs of a launch and others one, because each CTA
/// starts where a CTA of the previous launch ends.
template <class Warp>
std::size_t shared_for_two(const DeviceLimits& limits, const PairAttention& args, int stages) {
  const int a_third = shared_of_all(limits) / 3 - kReserved;
  return std::max(shared_bytes<Warp>(args, stages),
                  static_cast<std::size_t>(a_third / 16 * 16 + 16));
}

/// Rows of the workspace for parts of cut pairs, which are pairs whose tiles are in several CTAs.
/// Each CTA has at most two such parts.
inline std::size_t part_rows(const PairAttention& args, int ctas) {
  return 2 * static_cast<std::size_t>(ctas) * static_cast<std::size_t>(args.group);
}

/// Columns (a column is four dimensions of a query head) per CTA of a cluster. The last CTA may
/// have fewer.
template <int kDim>
__host__ __device__ constexpr int cluster_columns(int group) {
  return (group * kDim / 4 + kClusterCtas - 1) / kClusterCtas;
}
/// Bytes that a CTA receives from all parts of its cluster.
template <int kDim>
std::size_t cluster_parts_bytes(int group) {
  const std::size_t each = static_cast<std::size_t>(cluster_columns<kDim>(group)) * sizeof(float4) +
                           static_cast<std::size_t>(group) * sizeof(float2);
  return kClusterParts * each;
}

template <class Warp>
std::size_t clustered_bytes(const PairAttention& args, int stages) {
  using Own = Exchange<Warp::kHeadSize>;
  return Ring<Warp>::bytes(stages) + Own{args.group, nullptr}.parts_floats() * sizeof(float) +
         cluster_parts_bytes<Warp::kHeadSize>(args.group);
}

/// If each pair uses a cluster: the maximum number of tiles of a warp. The warp keeps all of them
/// in shared memory. 0 if clusters are not used. Clusters require a multiprocessor for each CTA,
/// and that no logits are stored for an observer.
template <class Warp>
int clustered_stages(const DeviceLimits& limits, const PairAttention& args) {
  const std::int64_t tiles = row_slots(args.table.max_slots) / kSlotsPerTile;
  const std::int64_t each = (tiles + kClusterCtas - 1) / kClusterCtas;
  const bool fits = limits.early_start && args.rows.logits == nullptr &&
                    args.table.pairs * kClusterCtas <= limits.multiprocessors &&
                    each <= Warp::kMaxStages &&
                    clustered_bytes<Warp>(args, static_cast<int>(each)) <=
                        static_cast<std::size_t>(limits.shared_bytes);
  return fits ? static_cast<int>(each) : 0;
}

template <class Warp>
PairLaunch plan_pairs(const DeviceLimits& limits, const PairAttention& args) {
  if constexpr (kVariesStages<Warp>)
    if (const int stages = clustered_stages<Warp>(limits, args))
      return {PairKernel::clusters,
              {.blocks = args.table.pairs * kClusterCtas,
               .stages = stages,
               .shared_bytes = clustered_bytes<Warp>(args, stages),
               .cluster = kClusterCtas}};
  const PairGrid grid = grid_for<Warp>(limits, args);
  if (grid.ctas == 0)
    return {PairKernel::one_by_one,
            {.shared_bytes = shared_bytes<Warp>(args, kVariesStages<Warp> ? 1 : Warp::kStages)}};
  return {grid.all_ahead ? PairKernel::all_ahead : PairKernel::one_by_one,
          {.blocks = for_whole_pairs(grid.ctas, args.table.pairs),
           .stages = grid.stages,
           .shared_bytes = shared_for_two<Warp>(limits, args, grid.stages)}};
}

/// Calls visit(Warp{}) with the class for the type, head size and numbering, which must be
/// supported, and for groups of up to kHeads heads.
template <int kHeads, class Visit>
auto with_warp(const PairAttention& args, Visit visit) {
  const auto by_type = [&]<int kDim, Rotated kRotated>() {
    switch (args.type) {
      case KVLAB_BF16:
        return visit.template operator()<TensorCoreWarp<__nv_bfloat16, kDim, kRotated, kHeads>>();
      case KVLAB_F16:
        return visit.template operator()<TensorCoreWarp<__half, kDim, kRotated, kHeads>>();
      case KVLAB_F32:
        break;
    }
    return visit.template operator()<PlainWarp<kDim, kRotated, kHeads>>();
  };
  const auto by_size = [&]<int kDim>() {
    if (args.ages != nullptr) return by_type.template operator()<kDim, Rotated::keys>();
    if (args.rules != nullptr) return by_type.template operator()<kDim, Rotated::query>();
    return by_type.template operator()<kDim, Rotated::none>();
  };
  switch (args.head_size) {
    case 64:
      return by_size.template operator()<64>();
    case 96:
      return by_size.template operator()<96>();
    case 128:
      return by_size.template operator()<128>();
    default:
      return by_size.template operator()<256>();
  }
}

}  // namespace kvlab::kernels
