// Ranks as the rule compares and combines them. A policy's rank() returns whole numbers or doubles;
// the rule holds either as a key of 64 bits whose order is the numbers', and adds and averages the
// numbers, never the keys.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <bit>
#include <cstdint>

namespace kvlab {

/// Which numbers keys stand for: what rank() returns.
enum class RankType { whole, real };

/// A key that orders as ranks do; -0 and 0 are equal, and NaN comes after every number.
constexpr std::uint64_t rank_key(std::uint64_t rank) { return rank; }
constexpr std::uint64_t rank_key(double rank) {
  if (rank != rank) return ~std::uint64_t{0};
  const auto bits = std::bit_cast<std::uint64_t>(rank == 0.0 ? 0.0 : rank);
  return bits >> 63 ? ~bits : bits | 0x8000'0000'0000'0000u;
}

/// The double that a key of a real rank stands for.
constexpr double real_rank(std::uint64_t key) {
  return std::bit_cast<double>(key >> 63 ? key & 0x7fff'ffff'ffff'ffffu : ~key);
}

/// The number that a key stands for, rounded where it is a whole one above 2^53.
constexpr double rank_number(RankType type, std::uint64_t key) {
  return type == RankType::real ? real_rank(key) : static_cast<double>(key);
}

/// What scope=layer adds ranks by. Whole numbers stop at 2^64 - 1; a sum of doubles is rounded.
constexpr std::uint64_t rank_sum(RankType type, std::uint64_t a, std::uint64_t b) {
  if (type == RankType::real) return rank_key(real_rank(a) + real_rank(b));
  const std::uint64_t sum = a + b;
  return sum < a ? ~std::uint64_t{0} : sum;
}

}  // namespace kvlab
