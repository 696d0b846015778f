// How many tokens of a cache are live, and how many are evicted before an append. Ranks determine
// which tokens are evicted, but not how many. So every executor can count tokens in advance.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

namespace kvlab {

/// Number of tokens to evict before the next append if `live` tokens are live. It is 0 if fewer
/// than `evict_at` tokens are live. Otherwise it is the number of live tokens beyond budget - 1. If
/// the budget or `evict_at` is 2^32 - 1, nothing is evicted.
constexpr std::uint32_t tokens_to_evict(std::uint32_t live, std::uint32_t budget,
                                        std::uint32_t evict_at) {
  return live < evict_at || live < budget ? 0 : live - (budget - 1);
}

/// Number of live tokens right before a token is appended and after the eviction for it. `fed`
/// tokens were appended before, one at a time, each after an eviction to the budget.
constexpr std::uint32_t live_before_append(std::uint32_t fed, std::uint32_t budget) {
  return fed - tokens_to_evict(fed, budget, budget);
}
/// Number of live tokens right after the last of `fed` tokens was appended.
constexpr std::uint32_t live_after_append(std::uint32_t fed, std::uint32_t budget) {
  return fed < budget ? fed : budget;
}

/// Counts the live tokens of one cache through its appends.
struct LiveTokenCount {
  std::uint32_t live = 0;
  std::uint32_t before = 0;    ///< value of `live` right before the last append
  std::uint32_t max_live = 0;  ///< maximum of `live` so far

  constexpr void append(std::uint32_t tokens) {
    before = live;
    live += tokens;
    max_live = live > max_live ? live : max_live;
  }
};

}  // namespace kvlab
