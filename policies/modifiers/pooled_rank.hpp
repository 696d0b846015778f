// One smoothed rank from its neighbours', one after another: for a device, which has no integer of
// 128 bits, and for doubles, of which the order matters. On the host smooth_ranks()
// (policies/modifiers/ranks.hpp) does all at once.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"
#include "policies/rank.hpp"

namespace kvlab {

class PooledRank {
 public:
  constexpr PooledRank(Modifiers::Pool pool, RankType type) : pool_(pool), type_(type) {}

  /// The next key, from the oldest on.
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
  /// The key of the mean, of whole numbers rounded down, or of the largest of at least one and
  /// fewer than 2^32 ranks.
  constexpr std::uint64_t value() const {
    if (pool_ == Modifiers::Pool::max) return low_;
    if (type_ == RankType::real) return rank_key(real_ / count_);
    // Long division by digits of 32 bits; the first is 0, as high_ is less than count_.
    const std::uint64_t upper = std::uint64_t{high_} << 32 | low_ >> 32;
    const std::uint64_t lower = upper % count_ << 32 | (low_ & 0xffff'ffffu);
    return upper / count_ << 32 | lower / count_;
  }

 private:
  Modifiers::Pool pool_;
  RankType type_;
  std::uint64_t low_ = 0;  // the sum of whole numbers, or the largest
  double real_ = 0;        // the sum of doubles
  std::uint32_t high_ = 0, count_ = 0;
};

}  // namespace kvlab
