// The rule of eviction, the same for all policies: it orders tokens by protection, then by the
// policy's rank, then by age.
#pragma once

#include <cstdint>

namespace kvlab {

/// Protected tokens, resolved against a budget. They belong to the rule and apply to any policy.
struct ProtectedTokens {
  std::uint32_t sinks = 0;   ///< positions below this are evicted last
  std::uint32_t recent = 0;  ///< the youngest tokens, including the next one to be appended

  /// 0: unprotected, 1: recent, 2: sink. The lowest is evicted first.
  constexpr std::uint32_t protection(std::uint32_t position, std::uint32_t now) const {
    if (position < sinks) return 2;
    return std::uint64_t{position} + recent > now ? 1 : 0;
  }
};

/// The eviction order: the token with the smallest key is evicted first.
struct EvictionKey {
  std::uint32_t protection;
  std::uint64_t rank;
  std::uint32_t position;

  constexpr bool operator<(const EvictionKey& other) const {
    if (protection != other.protection) return protection < other.protection;
    if (rank != other.rank) return rank < other.rank;
    return position < other.position;
  }
};

}  // namespace kvlab
