// The state that `snapkv` and `nacl` share: attention from the last queries, W of them.
#pragma once

#include "policies/fixed_point.hpp"
#include "policies/policy.hpp"

namespace kvlab {

struct LastQueries {
  struct Slot {
    std::uint64_t mass;  // Q32.32
  };

  static constexpr float weight_in(std::uint32_t age, std::uint32_t window) {
    return age < window ? 1.0f : 0.0f;
  }

  /// An admission of W queries or more: what its last W gave, exactly. Of fewer, n: what was there
  /// shrinks by (W - n) / W, so that what remains weighs as much as W queries would. One number a
  /// token cannot hold a window that slides.
  static constexpr void add(Slot& slot, const Observation& seen, std::uint32_t window,
                            const Step& step) {
    const double left = step.queries < window ? window - step.queries : 0;
    slot.mass = part_of(slot.mass, share32(left / window)) + seen.mass;
  }
};

}  // namespace kvlab
