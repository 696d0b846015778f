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

inline constexpr int kReplayScratch = 16;  ///< rows of kReplayDims, at least kMostReplayGroup

struct ReplayShared {
  union {
    SelectionShared selection;
    float scratch[kReplayScratch][kReplayDims];
  };
  float folded[2][kReplayWarps][24];                 // by parity
  uint4 first[2][kReplayWarps];                      // by parity: who leaves first of a warp's
  std::uint32_t moves;                               ///< of tokens to slots that others have left
  std::uint32_t gone;                                ///< one past the youngest token that leaves
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
/// Bytes of shared memory for a bit a token, who is live, in whole 16 bytes.
constexpr std::size_t bytes_of_words(const ReplayShape& shape) {
  return static_cast<std::size_t>((shape.words() + 3) / 4 * 16);
}

/// A thread of the thread block that takes one cache, and which cache that is.
struct CacheThread {
  const ReplayWalkArgs& args;
  int config, unit;
  ReplayRule rule;
  std::int64_t first_slot;  ///< of all caches
  std::uint32_t thread, threads, lane, warp, warps;

  __device__ explicit CacheThread(const ReplayWalkArgs& of)
      : args(of),
        config(of.members[blockIdx.x]),
        unit(of.grid.unit_of(config, static_cast<int>(blockIdx.y))),
        rule(of.grid.rules[cache()]),
        first_slot(unit * of.slots.of_unit + rule.first_slot),
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

  __device__ std::int64_t cache() const { return args.grid.cache_of(unit, config); }
  /// Query i of the block, among all units'.
  __device__ std::int64_t row(int i) const { return args.rows.row(unit, i); }
  /// The direct exponentials for query i of the block, [quad, slot].
  __device__ float4* direct(int i) const {
    const ReplaySlots& slots = args.slots;
    const std::int64_t planes = std::int64_t{unit} * slots.planes + i % slots.planes;
    return slots.direct + planes * args.shape.quads() * slots.of_unit + rule.first_slot;
  }
};

}  // namespace kvlab::kernels
