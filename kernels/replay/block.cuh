// What the thread block of one cache shares while it walks through a block of queries.
#pragma once

#include "kernels/device/fold.cuh"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

/// Threads of a cache, at most, and blocks of them that a multiprocessor's registers are shared out
/// for: old keys take many.
constexpr std::uint32_t replay_most_threads(bool squeezed) { return squeezed ? 384 : 320; }
constexpr int replay_blocks(bool squeezed) { return squeezed ? 1 : 2; }
inline constexpr int kReplayWarps = 12;
/// Slots that a thread takes together, a strip: as many as its registers hold.
constexpr int replay_strip(bool squeezed) { return squeezed ? 7 : 8; }
inline constexpr int kReplayDims = 4 * kWarpSize;  ///< of a value that a warp takes at once

/// Four query heads side by side, for each quad of a group.
template <int kQuads>
struct Quads {
  float4 quad[kQuads];
};

/// Of lane l component l: in every lane.
template <int kQuads>
__device__ inline Quads<kQuads> quads_of_lanes(float value, int first = 0) {
  Quads<kQuads> all;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) all.quad[quad] = of_lanes(value, first + 4 * quad);
  return all;
}

__device__ inline void add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}
__device__ inline void raise(float4& most, const float4& x) {
  most = {fmaxf(most.x, x.x), fmaxf(most.y, x.y), fmaxf(most.z, x.z), fmaxf(most.w, x.w)};
}

inline constexpr int kReplayScratch = 16;  ///< rows of kReplayDims, at least kMostReplayGroup

struct ReplayShared {
  union {
    SelectionShared selection;
    float scratch[kReplayScratch][kReplayDims];
  };
  float folded[2][kReplayWarps][24];  // by parity
  uint4 first[2][kReplayWarps];       // by parity: who leaves first of a warp's
  std::uint32_t moves, gone;
  std::uint32_t listed;                              ///< how many slots are in the list
  float kept[kMostReplayQueries][kMostReplayGroup];  // sums; negative: everything is kept
  std::uint32_t hits[kMostReplayQueries][kMostReplayGroup];
  std::uint32_t visible[kMostReplayQueries];
};

/// Threads of a cache of so many slots.
constexpr std::uint32_t replay_threads(std::uint32_t slots, bool squeezed) {
  const std::uint32_t of_warp = static_cast<std::uint32_t>(replay_strip(squeezed)) * kWarpSize,
                      threads = (slots + of_warp - 1) / of_warp * kWarpSize,
                      most = replay_most_threads(squeezed);
  return threads < most ? threads : most;
}
/// A cache's slots, in whole strips.
constexpr std::uint32_t whole_strips(std::uint32_t slots, bool squeezed) {
  const std::uint32_t strips =
      static_cast<std::uint32_t>(replay_strip(squeezed)) * replay_threads(slots, squeezed);
  return (slots + strips - 1) / strips * strips;
}
/// An old token's key for some queries of a run (kReplayAhead of them), to all of which it has the
/// same distance.
struct OldItem {
  std::uint32_t slot;
  std::uint32_t packed;  ///< distance, first query and end of the run: 24, 4 and 4 bits

  __device__ static OldItem of(std::uint32_t slot, std::uint32_t distance, std::uint32_t first,
                               std::uint32_t end) {
    return {slot, distance << 8 | first << 4 | end};
  }
  __device__ std::uint32_t distance() const { return packed >> 8; }
  __device__ int first() const { return static_cast<int>(packed >> 4 & 15); }
  __device__ int end() const { return static_cast<int>(packed & 15); }
};
inline constexpr int kMostOldDistance = 1 << 24;  ///< exclusive

/// Bytes of shared memory for whole strips of slots: states, positions, places, a list of slots,
/// rungs.
constexpr std::size_t replay_room(std::uint32_t slots, std::size_t slot_bytes, bool squeezed,
                                  bool rungs) {
  const std::size_t of_slot = slot_bytes + sizeof(std::uint32_t) * (squeezed ? 2 : 1) +
                              (squeezed ? sizeof(OldItem) : 0) + (rungs ? 1 : 0);
  return std::size_t{slots} * of_slot;
}
/// Bytes of shared memory for a bit a token, who is live, in whole 16 bytes.
constexpr std::size_t bytes_of_words(const ReplayArgs& args) {
  return static_cast<std::size_t>((args.samples.words + 3) / 4 * 16);
}

/// Positions [first, end).
struct ReplayRange {
  std::uint32_t first, end;

  __device__ static ReplayRange all() { return {0, ~0u}; }
  __device__ static ReplayRange none() { return {0, 0}; }
  __device__ bool empty() const { return first >= end; }
  __device__ bool has(std::uint32_t position) const { return position - first < end - first; }
  /// The least range that has both.
  __device__ void take(const ReplayRange& other) {
    if (other.empty()) return;
    *this = empty() ? other : ReplayRange{min(first, other.first), max(end, other.end)};
  }
};

/// Old keys to be rotated, and where their slots' tokens are.
struct ListedSlots {
  const OldItem* items;
  std::uint32_t count;
  const std::uint32_t* positions;  ///< by slot
};

/// One cache: a configuration of a unit.
struct ReplayPlace {
  const ReplayArgs& args;
  int config, unit;
  ReplayRule rule;
  std::int64_t first_slot;  ///< of all caches
  std::uint32_t thread, threads, lane, warp, warps;

  __device__ explicit ReplayPlace(const ReplayArgs& of)
      : args(of),
        config(of.members[blockIdx.x]),
        unit(of.unit_of(config, static_cast<int>(blockIdx.y))),
        rule(of.rule_of(unit, config)),
        first_slot(unit * of.caches.unit_slots + rule.first_slot),
        thread(threadIdx.x),
        threads(blockDim.x),
        lane(thread % kWarpSize),
        warp(thread / kWarpSize),
        warps(threads / kWarpSize) {}

  /// The first of this thread's slots, which it alone reads and writes in a step: a warp has kStrip
  /// times 32 that follow one another, and the next of a thread's strip is 32 further.
  template <int kStrip>
  __device__ std::uint32_t first_slot_of_thread() const {
    return warp * (kStrip * kWarpSize) + lane;
  }
  template <int kStrip>
  __device__ bool has_slot(std::uint32_t slot) const {
    return slot / (kStrip * kWarpSize) % warps == warp && slot % kWarpSize == lane;
  }
  /// Calls each(slot) for this thread's slots of [0, end).
  template <int kStrip, class Each>
  __device__ void for_slots(std::uint32_t end, Each each) const {
    for (std::uint32_t first = first_slot_of_thread<kStrip>(); first < end;
         first += kStrip * threads)
#pragma unroll
      for (int k = 0; k < kStrip; ++k)
        if (first + k * kWarpSize < end) each(first + k * kWarpSize);
  }

  /// Among all units' configurations.
  __device__ std::int64_t figure() const { return args.figure_of(unit, config); }
  /// Query i of the block, among all units'.
  __device__ std::int64_t row(int i) const { return std::int64_t{unit} * args.rows.block + i; }
  /// The exponentials that the cache computes itself for query i of the block, [quad, slot].
  __device__ float4* own(int i) const {
    const ReplayCaches& caches = args.caches;
    const std::int64_t planes = std::int64_t{unit} * caches.planes + i % caches.planes;
    return caches.own + planes * args.shape.quads() * caches.unit_slots + rule.first_slot;
  }
};

}  // namespace kvlab::kernels
