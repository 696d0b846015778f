// Data in shared memory that the thread block of one cache uses while it processes a block of
// queries.
#pragma once

#include "kernels/device/eviction_order.cuh"
#include "kernels/device/fold.cuh"
#include "kernels/device/select_victims.cuh"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

/// Maximum number of threads per cache. It is limited by the registers of a multiprocessor.
/// Rotating old keys (cache positions) takes many registers.
constexpr std::uint32_t replay_max_threads(bool cache_positions) {
  return cache_positions ? 384 : 320;
}
constexpr int replay_blocks(bool cache_positions) { return cache_positions ? 1 : 2; }
inline constexpr int kReplayWarps = 12;
/// Number of slots that a thread processes together (a strip). More slots would not fit in its
/// registers.
constexpr int replay_strip(bool cache_positions) { return cache_positions ? 7 : 8; }
/// Number of dimensions of a value that a warp processes at once.
inline constexpr int kReplayDims = 4 * kWarpSize;

/// Four query heads side by side, for each head group of a KV head.
template <int kHeadGroups>
struct HeadGroups {
  float4 head_group[kHeadGroups];
};

/// Head h of the result is the `value` that lane first + h passes. Every lane gets the heads of all
/// head groups.
template <int kHeadGroups>
__device__ inline HeadGroups<kHeadGroups> head_groups_of_lanes(float value, int first = 0) {
  HeadGroups<kHeadGroups> all;
#pragma unroll
  for (int head_group = 0; head_group < kHeadGroups; ++head_group)
    all.head_group[head_group] = gather_lanes(value, first + 4 * head_group);
  return all;
}

inline constexpr int kReplayScratch =
    16;  ///< rows of kReplayDims numbers; at least kMaxReplayGroup

struct ReplayShared {
  union {
    SelectionShared selection;
    float scratch[kReplayScratch][kReplayDims];
  };
  float folded[2][kReplayWarps][24];  // two buffers, used alternately
  EvictionCandidate
      first[2][kReplayWarps];  // two buffers, used alternately: the first victim of each warp
  std::uint32_t moves;         ///< number of tokens that move to slots of evicted tokens
  std::uint32_t gone;          ///< one past the position of the youngest evicted token
  std::uint32_t listed;        ///< number of slots in the list of old keys
  /// Sums of kept exponentials.
  float kept[kMaxReplayQueries][kMaxReplayGroup];
  std::uint32_t hits[kMaxReplayQueries][kMaxReplayGroup];
  std::uint32_t visible[kMaxReplayQueries];
};

/// The number of threads for a cache with `slots` slots.
constexpr std::uint32_t replay_threads(std::uint32_t slots, bool cache_positions) {
  const std::uint32_t slots_per_warp =
                          static_cast<std::uint32_t>(replay_strip(cache_positions)) * kWarpSize,
                      threads = (slots + slots_per_warp - 1) / slots_per_warp * kWarpSize,
                      max_threads = replay_max_threads(cache_positions);
  return threads < max_threads ? threads : max_threads;
}
/// A cache's slots, rounded up to whole strips.
constexpr std::uint32_t whole_strips(std::uint32_t slots, bool cache_positions) {
  const std::uint32_t strips = static_cast<std::uint32_t>(replay_strip(cache_positions)) *
                               replay_threads(slots, cache_positions);
  return (slots + strips - 1) / strips * strips;
}
/// Bytes of shared memory for one bit per token that tells whether the token is live. Rounded up to
/// 16 bytes.
constexpr std::size_t bytes_of_words(const ReplayShape& shape) {
  return static_cast<std::size_t>((shape.words() + 3) / 4 * 16);
}

/// A thread of the thread block that handles one cache, and the numbers that identify the cache.
struct CacheThread {
  const ReplayWalkArgs& args;
  int config, task;
  ReplayRule rule;
  std::int64_t first_slot;  ///< among the slots of all caches
  std::uint32_t thread, threads, lane, warp, warps;

  __device__ explicit CacheThread(const ReplayWalkArgs& walk_args)
      : args(walk_args),
        config(walk_args.members[blockIdx.x]),
        task(walk_args.sweep.task_of(config, static_cast<int>(blockIdx.y))),
        rule(walk_args.sweep.rules[cache()]),
        first_slot(task * walk_args.slots.task_stride + rule.first_slot),
        thread(threadIdx.x),
        threads(blockDim.x),
        lane(thread % kWarpSize),
        warp(thread / kWarpSize),
        warps(threads / kWarpSize) {}

  /// This thread's first slot. During a step, no other thread accesses the slots of this thread. A
  /// warp handles kStrip * 32 consecutive slots, and the slots of one thread's strip are 32 apart.
  template <int kStrip>
  __device__ std::uint32_t first_slot_of_thread() const {
    return warp * (kStrip * kWarpSize) + lane;
  }
  template <int kStrip>
  __device__ bool has_slot(std::uint32_t slot) const {
    return slot / (kStrip * kWarpSize) % warps == warp && slot % kWarpSize == lane;
  }
  /// Calls each(slot) for this thread's slots in [0, end).
  template <int kStrip, class Each>
  __device__ void for_slots(std::uint32_t end, Each each) const {
    for (std::uint32_t first = first_slot_of_thread<kStrip>(); first < end;
         first += kStrip * threads)
#pragma unroll
      for (int k = 0; k < kStrip; ++k)
        if (first + k * kWarpSize < end) each(first + k * kWarpSize);
  }

  __device__ std::int64_t cache() const { return args.sweep.cache_of(task, config); }
  /// The index of the row of query i of the block, counted over all head tasks.
  __device__ std::int64_t row(int i) const { return args.rows.row(task, i); }
  /// The direct exponentials of query i of the block, [head group, slot].
  __device__ float4* direct(int i) const {
    const ReplaySlots& slots = args.slots;
    const std::int64_t planes = std::int64_t{task} * slots.planes + i % slots.planes;
    return slots.direct + planes * args.shape.head_groups() * slots.task_stride + rule.first_slot;
  }
};

}  // namespace kvlab::kernels
