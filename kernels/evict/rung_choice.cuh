// Who leaves each rung of a pair first, where its first rung has no room: a policy's kernels
// choose, step_down_pairs() moves.
#pragma once

#include "kernels/codes/coded_cache.hpp"
#include "kernels/device/leaving.cuh"

namespace kvlab::kernels {

/// Those of a pair's rows that a rung has.
struct RungRows {
  std::uint32_t first = 0, count = ~0u;
  __device__ bool hold(std::uint32_t row) const { return row - first < count; }
};

/// Null, all of it, where a cache has no rungs below one another.
struct RungChoice {
  const DeviceLadder* ladders = nullptr;  // [pair]
  const std::uint32_t* places = nullptr;  // [slot]
  const std::int32_t* counts = nullptr;   // [pair, kMostRungs]
  Leaving* firsts = nullptr;              // [pair, kMostRungs], out
  int most_rungs = 1;

  RungChoice() = default;
  RungChoice(const CodedCache* coded, Leaving* to) {
    if (coded == nullptr || coded->most_rungs == 1) return;
    ladders = coded->ladders, places = coded->places, counts = coded->counts, firsts = to;
    most_rungs = coded->most_rungs;
  }

  __host__ __device__ bool in_use() const { return ladders != nullptr; }
  __device__ int rungs(int pair) const { return in_use() ? ladders[pair].rungs : 1; }
  __device__ RungRows rows(int pair, int rung) const {
    if (!in_use()) return {};
    const DeviceRung& own = ladders[pair].rung[rung];
    return {own.first_row, own.rows};
  }
  __device__ int rung(int pair, std::int64_t slot) const {
    return in_use() ? rung_of(ladders[pair], places[slot]) : 0;
  }
  /// Whether the first rung holds all that it is to hold.
  __device__ bool is_full(int pair) const {
    return in_use() &&
           counts[pair * kMostRungs] >= static_cast<std::int32_t>(ladders[pair].rung[0].slots);
  }
};

}  // namespace kvlab::kernels
