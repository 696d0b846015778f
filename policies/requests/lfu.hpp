// lfu: evicts the token with the fewest requests so far. Half of the budget is for recent tokens,
// because a new token has no requests yet.
//
// The classic cache policy (least frequently used). New entries are treated separately, as in
// Robinson and Devarakonda 1990, "Data cache management using frequency-based replacement", section
// 2. For attention it equals the counts of Scissorhands without a window, or H2O with a threshold
// in place of the sum. Deliberate differences from a cache of blocks:
//   - a query requests many tokens at once: those to which it gives at least tau times the row's
//     largest probability (docs/reference/policies.md);
//   - counts never decay, and requests count even while a token is protected as recent; at equal
//     count, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Lfu {
  static constexpr PolicyInfo kInfo{.name = "lfu",
                                    .summary = "evicts the least often requested token",
                                    .citation =
                                        "after Robinson and Devarakonda 1990, frequency-based "
                                        "replacement (doi:10.1145/98457.98523)",
                                    .needs = Needs::requests,
                                    .recent = percent(50)};
  struct Params {};
  struct Slot {
    std::uint32_t requests;
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.requests = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.requests += seen.requests;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.requests;
  }
};

}  // namespace kvlab
