// scissorhands: evicts the token with the fewest requests among the last 400 queries; the 10
// youngest tokens are protected.
//
// Liu et al. 2023, "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV
// Cache Compression at Test Time", algorithm 2 (window 400, 10 recent tokens). Deliberate
// differences from it, and from the released code, which implements yet another rule:
//   - the window moves by quarters: there are four counts of window/4 queries each. The newest
//     count is incomplete, so the window covers the last 301 to 400 queries. A window that moves by
//     one query would need 400 bits per token;
//   - the requests of an append of many queries count as requests of its last query. If the append
//     has more queries than the window, they are scaled by window / queries, rounded down;
//   - a request is a probability of at least tau times the row's largest, not of more than 1/t,
//     where t is the number of tokens so far; a query counts once for a group of query heads;
//   - one token is evicted per step, not half of the budget at once;
//   - every layer has the same budget; each KV head keeps one set of tokens; at equal count, the
//     older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Scissorhands {
  static constexpr PolicyInfo kInfo{
      .name = "scissorhands",
      .summary = "evicts the token that the last queries requested least often",
      .citation = "Liu et al. 2023, Scissorhands, algorithm 2 (arXiv:2305.17118)",
      .needs = Needs::requests,
      .recent = tokens(10)};
  struct Params {
    double window;
  };
  static constexpr Param<Params> kParams[] = {
      {"window", "number of last queries that count", &Params::window, 400, 4, 32768}};
  struct Slot {
    std::uint64_t counts;  // four 16-bit counts, one per quarter; the lowest bits are the newest
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.counts = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step& step) {
    const auto window = static_cast<std::uint32_t>(params.window);
    const std::uint32_t quarter = window / 4, last = step.now + step.queries - 1;
    // Quarters end at the same queries for all tokens, so no token has to store when its quarter
    // ends.
    const std::uint32_t begun = last / quarter - (step.now > 0 ? (step.now - 1) / quarter : 0);
    const std::uint64_t older = begun < 4 ? slot.counts << (16 * begun) : 0;
    std::uint64_t requests = seen.requests;
    if (step.queries > window) requests = requests * window / step.queries;
    const std::uint64_t newest = (older & 0xffff) + requests;
    slot.counts = (older & ~std::uint64_t{0xffff}) | (newest < 0xffff ? newest : 0xffff);
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    const std::uint64_t counts = slot.counts;
    return (counts & 0xffff) + (counts >> 16 & 0xffff) + (counts >> 32 & 0xffff) + (counts >> 48);
  }
};

}  // namespace kvlab
