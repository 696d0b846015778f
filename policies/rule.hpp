// The one rule of eviction: guards first, then the policy's rank, then age.
#pragma once

#include <cstdint>

namespace kvlab {

/// Guards in tokens, resolved against a budget. They belong to the rule and apply to any policy.
struct Guards {
  std::uint32_t sinks = 0;   ///< positions below this leave last
  std::uint32_t recent = 0;  ///< the last `recent` tokens, the first admitted one included

  /// 0: unguarded, 1: recent, 2: sink. Lower leaves first.
  constexpr std::uint32_t guard(std::uint32_t position, std::uint32_t now) const {
    if (position < sinks) return 2;
    return std::uint64_t{position} + recent > now ? 1 : 0;
  }
};

/// The order of leaving: the token with the smallest key leaves first.
struct LeavingKey {
  std::uint32_t guard;
  std::uint64_t rank;
  std::uint32_t position;

  constexpr bool operator<(const LeavingKey& other) const {
    if (guard != other.guard) return guard < other.guard;
    if (rank != other.rank) return rank < other.rank;
    return position < other.position;
  }
};

}  // namespace kvlab
