// The state that `snapkv` and `nacl` share: attention from the last queries, W of them.
#pragma once

#include "policies/fixed_point.hpp"
#include "policies/policy.hpp"

namespace kvlab {

struct LastQueries {
  struct Params {
    double window;  // W
  };
  struct Slot {
    std::uint64_t mass;  // Q32.32
  };

  static constexpr std::uint32_t tail(const Params& params) {
    return static_cast<std::uint32_t>(params.window);
  }
  static constexpr float weight(std::uint32_t age, const Params& params) {
    return age < tail(params) ? 1.0f : 0.0f;
  }
  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.mass = 0; }

  /// An append of W queries or more: what its last W gave, exactly. Of fewer, n: what was there
  /// is scaled by (W - n) / W, rounded down to units of 2^-32, so that what remains weighs as much
  /// as W queries would. One number a token cannot hold a window that slides.
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step& step) {
    const std::uint32_t window = tail(params);
    const double left = step.queries < window ? window - step.queries : 0;
    slot.mass = part_of(slot.mass, share32(left / window)) + seen.mass;
  }
};

}  // namespace kvlab
