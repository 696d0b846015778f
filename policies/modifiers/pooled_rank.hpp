// Computes one smoothed rank from the ranks of neighbours, which are added one by one. Devices need
// this form because they have no 128-bit integers. Sums of doubles depend on the order of the
// additions, so the host uses this form for means of doubles, too. In the other cases,
// smooth_ranks() (policies/modifiers/ranks.hpp) smooths all ranks at once on the host.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"
#include "policies/rank.hpp"

namespace kvlab {

class PooledRank {
 public:
  constexpr PooledRank(Modifiers::Pool pool, RankType type) : pool_(pool), type_(type) {}

  /// Adds the next key. Call in order, from the oldest token on.
  constexpr void take(std::uint64_t rank) {
    ++count_;
    if (pool_ == Modifiers::Pool::max) {
      low_ = rank > low_ ? rank : low_;
    } else if (type_ == RankType::real) {
      real_ += real_rank(rank);
    } else {
      low_ += rank;
      high_ += low_ < rank ? 1 : 0;
    }
  }
  /// The key of the maximum or of the mean, which is rounded down for whole numbers. Requires at
  /// least one and fewer than 2^32 ranks.
  constexpr std::uint64_t value() const {
    if (pool_ == Modifiers::Pool::max) return low_;
    if (type_ == RankType::real) return rank_key(real_ / count_);
    // Long division in 32-bit digits; the first digit of the result is 0, because high_ is less
    // than count_.
    const std::uint64_t upper = std::uint64_t{high_} << 32 | low_ >> 32;
    const std::uint64_t lower = upper % count_ << 32 | (low_ & 0xffff'ffffu);
    return upper / count_ << 32 | lower / count_;
  }

 private:
  Modifiers::Pool pool_;
  RankType type_;
  std::uint64_t low_ = 0;  // the sum of whole numbers, or the maximum
  double real_ = 0;        // the sum of doubles
  std::uint32_t high_ = 0, count_ = 0;
};

}  // namespace kvlab
