// The state that `snapkv` and `nacl` share: attention from the last W queries.
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

  /// An append of at least W queries replaces the mass by exactly the mass that its last W queries
  /// gave. An append of n < W queries scales the earlier mass by (W - n) / W, rounded down to units
  /// of 2^-32, so that the total has the weight of W queries. This is an approximation, because one
  /// number per token cannot represent a sliding window.
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step& step) {
    const std::uint32_t window = tail(params);
    const double left = step.queries < window ? window - step.queries : 0;
    slot.mass = part_of(slot.mass, share32(left / window)) + seen.mass;
  }
};

}  // namespace kvlab
