// lazy_eviction: by the longest time between two requests. A token that has been silent for long,
// measured by its own longest silence before, is evicted first.
//
// Zhang et al. 2025, "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for
// Efficient Long Reasoning", section 4: the time of the last request TS, the maximum recurrence
// interval MRI, and the importance of token i after query t,
// 2 sigmoid(-(t - TS) / MRI) + 2 sigmoid(-(MRI - 1)); a token of MRI 0 comes last.
// Deliberate differences from it:
//   - 2 sigmoid(-x) is 1 / (1 + x): 1 at 0 and falling too, and the same on host and device. So the
//     importance is MRI / (MRI + t - TS) + 1 / MRI; of the second term the accounts of the paper
//     that we could read differ in form and agree that a smaller MRI counts more. It is taken as one
//     fraction, rounded once, so that equal importances are equal ranks;
//   - one leaves a step; theirs leave W at a time, and W, set for each task, are recent. Ours: a
//     quarter of the budget;
//   - a request is a probability of at least tau of the row's largest, not of at least 1e-4;
//   - of an append of many queries only the last request and the number are known: their mean
//     interval, rounded up, stands for the longest; ties: the older is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct LazyEviction {
  static constexpr PolicyInfo kInfo{
      .name = "lazy_eviction",
      .summary = "the longest silent by its own longest silence is evicted first",
      .citation = "Zhang et al. 2025, LazyEviction, section 4 (arXiv:2506.15969)",
      .needs = Needs::requests,
      .recent = percent(25)};
  struct Params {};
  struct Slot {
    std::uint32_t last_request, interval;  // interval 0: none came after it was appended
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
    // Whole numbers of at most 64 bits, and exact as doubles up to 90 million tokens.
    const std::uint64_t interval = slot.interval,
                        since = interval + (step.now - 1 - slot.last_request);
    return static_cast<double>(interval * interval + since) / static_cast<double>(interval * since);
  }
};

}  // namespace kvlab
