// One smoothed rank from its neighbours', one after another: for a device, which has no integer of
// 128 bits. On the host smooth_ranks() (policies/modifiers/ranks.hpp) does all at once.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"

namespace kvlab {

class PooledRank {
 public:
  constexpr explicit PooledRank(Modifiers::Pool pool) : pool_(pool) {}

  constexpr void take(std::uint64_t rank) {
    if (pool_ == Modifiers::Pool::max) {
      low_ = rank > low_ ? rank : low_;
      return;
    }
    low_ += rank;
    high_ += low_ < rank ? 1 : 0;
    ++count_;
  }
  /// The mean, rounded down, or the largest of at least one and fewer than 2^32 ranks.
  constexpr std::uint64_t value() const {
    if (pool_ == Modifiers::Pool::max) return low_;
    // Long division by digits of 32 bits; the first is 0, as high_ is less than count_.
    const std::uint64_t upper = std::uint64_t{high_} << 32 | low_ >> 32;
    const std::uint64_t lower = upper % count_ << 32 | (low_ & 0xffff'ffffu);
    return upper / count_ << 32 | lower / count_;
  }

 private:
  Modifiers::Pool pool_;
  std::uint64_t low_ = 0;  // the sum, or the largest
  std::uint32_t high_ = 0, count_ = 0;
};

}  // namespace kvlab
