// Ranks that are smoothed by age before many tokens leave a cache of the replay.
#pragma once

#include "kernels/replay/replay.hpp"
#include "policies/modifiers/pooled_rank.hpp"

namespace kvlab::kernels {

/// A cache's live tokens, and room for each.
struct RanksToSmooth {
  std::uint64_t* ranks;             // [slot]
  const std::uint32_t* positions;   // [slot]
  const std::uint32_t* live_words;  // bits of the live positions
  std::uint32_t live;
  Observation* by_age;  // [slot]: their masses hold ranks by age
  std::uint32_t* ages;  // [slot]
};

/// How many live tokens are older.
__device__ inline std::uint32_t age_of(std::uint32_t position, const std::uint32_t* live_words) {
  std::uint32_t older = __popc(live_words[position / 32] & ((1u << position % 32) - 1));
  for (std::uint32_t w = 0; w < position / 32; ++w) older += __popc(live_words[w]);
  return older;
}

/// Every rank becomes what the modifiers make of those at most so many places away by age: by the
/// whole block.
__device__ __noinline__ void smooth_ranks(const RanksToSmooth& of, const Modifiers& modifiers,
                                          RankType type) {
  for (std::uint32_t i = threadIdx.x; i < of.live; i += blockDim.x) {
    of.ages[i] = age_of(of.positions[i], of.live_words);
    of.by_age[of.ages[i]].mass = of.ranks[i];
  }
  __syncthreads();
  const std::uint32_t reach = min(modifiers.smooth, of.live);
  for (std::uint32_t i = threadIdx.x; i < of.live; i += blockDim.x) {
    const std::uint32_t age = of.ages[i], end = min(age + reach + 1, of.live);
    PooledRank pooled(modifiers.pool, type);
    for (std::uint32_t a = age - min(age, reach); a < end; ++a) pooled.take(of.by_age[a].mass);
    of.ranks[i] = pooled.value();
  }
  __syncthreads();
}

}  // namespace kvlab::kernels
