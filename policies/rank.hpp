// Ranks as 64-bit keys. A policy's rank() returns whole numbers or doubles. The eviction rule
// stores both as 64-bit keys that have the same order as the numbers. Sums and means are computed
// from the numbers, never from the keys.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <bit>
#include <cstdint>

namespace kvlab {

/// The type of the numbers that keys encode, which is the return type of rank().
enum class RankType { whole, real };

/// Converts a rank to a key that has the same order. -0 equals 0, and NaN comes after every number.
constexpr std::uint64_t rank_key(std::uint64_t rank) { return rank; }
constexpr std::uint64_t rank_key(double rank) {
  if (rank != rank) return ~std::uint64_t{0};
  const auto bits = std::bit_cast<std::uint64_t>(rank == 0.0 ? 0.0 : rank);
  return bits >> 63 ? ~bits : bits | 0x8000'0000'0000'0000u;
}

/// The double that a key of a real rank encodes.
constexpr double real_rank(std::uint64_t key) {
  return std::bit_cast<double>(key >> 63 ? key & 0x7fff'ffff'ffff'ffffu : ~key);
}

/// The number that a key encodes. A whole number above 2^53 is rounded.
constexpr double rank_number(RankType type, std::uint64_t key) {
  return type == RankType::real ? real_rank(key) : static_cast<double>(key);
}

/// The key of the sum of two ranks, for scope=layer. Whole numbers saturate at 2^64 - 1; a sum of
/// doubles is rounded.
constexpr std::uint64_t rank_sum(RankType type, std::uint64_t a, std::uint64_t b) {
  if (type == RankType::real) return rank_key(real_rank(a) + real_rank(b));
  const std::uint64_t sum = a + b;
  return sum < a ? ~std::uint64_t{0} : sum;
}

}  // namespace kvlab
