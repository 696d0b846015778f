// scissorhands: the token with the fewest requests among the last queries, a window of 400, leaves
// first; the 10 youngest stay.
//
// Liu et al. 2023, "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV
// Cache Compression at Test Time", algorithm 2 (window 400, 10 recent tokens).
// Deliberate differences from it, and from the code that was released, which is another rule again:
//   - the window moves by quarters: four counts of window/4 queries each, the newest of them not
//     full, so it holds the last 301 to 400 queries. A window that slides by one would need 400
//     bits a token;
//   - what an append of many queries gives counts as of its last query, and where these are more
//     than the window, in the window's proportion, rounded down;
//   - a request is a probability of at least tau of the row's largest, not of more than 1/t, and a
//     query counts once for a group of query heads;
//   - one token leaves a step, not half of the budget at once;
//   - every layer has the same budget; one kept set for each KV head; ties: the older is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Scissorhands {
  static constexpr PolicyInfo kInfo{
      .name = "scissorhands",
      .summary = "the least often requested by the last queries is evicted first",
      .citation = "Liu et al. 2023, Scissorhands, algorithm 2 (arXiv:2305.17118)",
      .needs = Needs::requests,
      .recent = tokens(10)};
  struct Params {
    double window;
  };
  static constexpr Param<Params> kParams[] = {
      {"window", "queries that count", &Params::window, 400, 4, 32768}};
  struct Slot {
    std::uint64_t counts;  // four of 16 bits, by quarters of the window; the newest is the lowest
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.counts = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step& step) {
    const auto window = static_cast<std::uint32_t>(params.window);
    const std::uint32_t quarter = window / 4, last = step.now + step.queries - 1;
    // Quarters end at the same queries for all tokens, so nobody has to note where his ended.
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
