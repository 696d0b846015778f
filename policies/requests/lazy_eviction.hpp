// lazy_eviction: evicts the token whose last request is longest ago, relative to its longest
// interval between two requests so far.
//
// Zhang et al. 2025, "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for
// Efficient Long Reasoning", section 4. It uses the time of the last request TS, the maximum
// recurrence interval MRI, and the importance of token i after query t, 2 sigmoid(-(t - TS) / MRI)
// + 2 sigmoid(-(MRI - 1)). A token of MRI 0 has the lowest importance. Deliberate differences from
// it:
//   - 2 sigmoid(-x) is replaced by 1 / (1 + x), which is also 1 at x = 0 and decreases, and has the
//     same value on host and device. The importance becomes MRI / (MRI + t - TS) + 1 / MRI. The
//     versions of the paper that we could read differ in the form of the second term, but agree
//     that a smaller MRI counts more. The sum is computed as one fraction, rounded once, so equal
//     importances give equal ranks;
//   - one token is evicted per step. The authors' code evicts W tokens at a time and protects the W
//     most recent ones, where W is set for each task. Here a quarter of the budget is for recent
//     tokens;
//   - a request is a probability of at least tau times the row's largest, not of at least 1e-4;
//   - for an append of many queries, only the last request and the number of requests are known.
//     The mean interval between them, rounded up, is used as the longest one;
//   - at equal rank, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct LazyEviction {
  static constexpr PolicyInfo kInfo{
      .name = "lazy_eviction",
      .summary =
          "evicts the token with the longest time since its last request, relative to its own "
          "longest gap between requests",
      .citation = "Zhang et al. 2025, LazyEviction, section 4 (arXiv:2506.15969)",
      .needs = Needs::requests,
      .recent = percent(25)};
  struct Params {};
  struct Slot {
    std::uint32_t last_request, interval;  // interval 0: no request after the append
  };

  static constexpr void append(Slot& slot, Token token, const Params&, const Step&) {
    slot.last_request = token.position;
    slot.interval = 0;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    if (seen.requests == 0) return;
    const std::uint32_t silent = seen.last_request - slot.last_request;
    const std::uint32_t mean = silent / seen.requests + (silent % seen.requests > 0 ? 1 : 0);
    slot.interval = mean > slot.interval ? mean : slot.interval;
    slot.last_request = seen.last_request;
  }
  static constexpr double rank(const Slot& slot, Token, const Params&, const Step& step) {
    if (slot.interval == 0) return 0;
    // These integers have at most 64 bits. They are exact as doubles up to 90 million tokens.
    const std::uint64_t interval = slot.interval,
                        since = interval + (step.now - 1 - slot.last_request);
    return static_cast<double>(interval * interval + since) / static_cast<double>(interval * since);
  }
};

}  // namespace kvlab
