// When the first tier of a pair is full, the first victim of that tier is demoted to the next tier.
// If the next tier is also full, its first victim is demoted too, and so on. A policy's kernels
// find the first victim of each tier, and demote_pairs() moves these tokens.
#pragma once

#include "kernels/device/eviction_order.cuh"
#include "kernels/quantized/quantized_cache.hpp"

namespace kvlab::kernels {

/// The rows of a pair that belong to a tier.
struct TierRows {
  std::uint32_t first = 0, count = ~0u;
  __device__ bool hold(std::uint32_t row) const { return row - first < count; }
};

/// Where to find the tiers of each pair, and where to write the chosen tokens. All pointers are
/// null if no pair has a second tier.
struct TierChoice {
  const DeviceTierPlan* tier_plans = nullptr;  // [pair]
  const std::uint32_t* row_of_slot = nullptr;  // [slot]
  const std::int32_t* counts = nullptr;        // [pair, kMaxDeviceTiers]
  EvictionCandidate* firsts = nullptr;         // [pair, kMaxDeviceTiers], out
  int max_tiers = 1;

  TierChoice() = default;
  TierChoice(const QuantizedCache* quantized_cache, EvictionCandidate* to) {
    if (quantized_cache == nullptr || quantized_cache->max_tiers == 1) return;
    tier_plans = quantized_cache->tier_plans, row_of_slot = quantized_cache->row_of_slot,
    counts = quantized_cache->counts, firsts = to;
    max_tiers = quantized_cache->max_tiers;
  }

  __host__ __device__ bool in_use() const { return tier_plans != nullptr; }
  __device__ int tiers(int pair) const { return in_use() ? tier_plans[pair].tiers : 1; }
  __device__ TierRows rows(int pair, int tier) const {
    if (!in_use()) return {};
    const DeviceTier& own = tier_plans[pair].tier[tier];
    return {own.first_row, own.rows};
  }
  __device__ int tier(int pair, std::int64_t slot) const {
    return in_use() ? tier_of(tier_plans[pair], row_of_slot[slot]) : 0;
  }
  /// Whether the first tier holds the maximum number of tokens.
  __device__ bool is_full(int pair) const {
    return in_use() && static_cast<std::uint32_t>(counts[pair * kMaxDeviceTiers]) >=
                           tier_plans[pair].tier[0].slots;
  }
};

}  // namespace kvlab::kernels
