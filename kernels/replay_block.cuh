// What the thread block of one cache shares while it walks through a block of queries.
#pragma once

#include "kernels/device/fold.cuh"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay.hpp"

namespace kvlab::kernels {

inline constexpr int kReplayThreads = 512;  ///< of a cache, at most
inline constexpr int kReplayWarps = kReplayThreads / kWarpSize;
/// Slots that a thread takes together, as many threads apart: a run. Old keys are work for more
/// warps.
constexpr std::uint32_t replay_run(bool squeezed) { return squeezed ? 4 : 8; }
inline constexpr int kReplayDims = 4 * kWarpSize;  ///< of a value that a warp takes at once
inline constexpr int kReplayListed = 64;           ///< slots whose logits a warp is to compute

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

struct ReplayShared {
  union {
    SelectionShared selection;
    float scratch[kMostReplayGroup][kReplayDims];
    std::uint32_t listed[kReplayWarps][kReplayListed];
  };
  float folded[2][kReplayWarps][24];  // by parity
  uint4 first[2][kReplayWarps];       // by parity: who leaves first of a warp's
  std::uint32_t moves, gone;
  float kept[kMostReplayQueries][kMostReplayGroup];  // sums; negative: everything is kept
  std::uint32_t hits[kMostReplayQueries][kMostReplayGroup];
  std::uint32_t visible[kMostReplayQueries];
};

/// Threads of a cache of so many slots.
constexpr std::uint32_t replay_threads(std::uint32_t slots, bool squeezed) {
  const std::uint32_t of_warp = replay_run(squeezed) * kWarpSize,
                      warps = (slots + of_warp - 1) / of_warp;
  return warps < kReplayWarps ? warps * kWarpSize : kReplayThreads;
}
/// Its slots, in whole runs.
constexpr std::uint32_t whole_runs(std::uint32_t slots, bool squeezed) {
  const std::uint32_t run = replay_run(squeezed) * replay_threads(slots, squeezed);
  return (slots + run - 1) / run * run;
}
/// Bytes of shared memory for whole runs of slots: states, positions, places, stamps.
constexpr std::size_t replay_room(std::uint32_t slots, std::size_t slot_bytes, bool squeezed) {
  const std::size_t of_slot = slot_bytes + sizeof(std::uint32_t) * (squeezed ? 3 : 1);
  return std::size_t{slots} * of_slot;
}

/// One cache: a configuration of a unit.
struct ReplayPlace {
  const ReplayArgs& args;
  int unit, config;
  ReplayRule rule;
  std::int64_t first_slot;  ///< of all caches
  std::uint32_t thread, threads, lane, warp, warps;

  __device__ explicit ReplayPlace(const ReplayArgs& of)
      : args(of),
        unit(static_cast<int>(blockIdx.y)),
        config(of.members[blockIdx.x]),
        rule(of.rules[config]),
        first_slot(unit * of.caches.unit_slots + rule.first_slot),
        thread(threadIdx.x),
        threads(blockDim.x),
        lane(thread % kWarpSize),
        warp(thread / kWarpSize),
        warps(threads / kWarpSize) {}

  /// Calls each(slot) for this thread's slots of [0, end), which it alone reads and writes in a
  /// step.
  template <class Each>
  __device__ void for_slots(std::uint32_t end, Each each) const {
    for (std::uint32_t slot = thread; slot < end; slot += threads) each(slot);
  }
  __device__ bool has_slot(std::uint32_t slot) const { return slot % threads == thread; }

  /// Among all units' configurations.
  __device__ std::int64_t figure() const {
    return std::int64_t{unit} * args.figures.configs + config;
  }
  /// Query i of the block, among all units'.
  __device__ std::int64_t row(int i) const { return std::int64_t{unit} * args.rows.block + i; }
  /// A sample of the span, among all that the walks leave.
  __device__ std::int64_t sample(int index) const {
    return figure() * args.samples.capacity +
           index / args.span.sample_every % args.samples.capacity;
  }
  /// The exponentials that the cache computes itself for query i of the block, [quad, slot].
  __device__ float4* own(int i) const {
    const ReplayCaches& caches = args.caches;
    const std::int64_t planes = std::int64_t{unit} * caches.planes + i % caches.planes;
    return caches.own + planes * args.shape.quads() * caches.unit_slots + rule.first_slot;
  }
};

}  // namespace kvlab::kernels
