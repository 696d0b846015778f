// nacl: proxy tokens and chance. The token that the prompt's last queries, the proxies, attend to
// least is evicted first, but for a random share of the budget.
//
// Chen et al. 2024, "NACL: A General and Effective KV Cache Eviction Framework for LLMs at
// Inference Time", section 4 (proxy-tokens eviction, random eviction); shares of the authors' code
// at 20%: 7 of 20 random, 1 of 20 protected; chosen once, after the prompt, which is its own
// modifier
// (`nacl:once=no` goes on evicting while it decodes).
// Deliberate differences from it:
//   - the proxies are a number of queries, not 1% of the prompt: a weight knows no length;
//   - the random tokens are sampled alike, each by a hash of its own, so their number varies a little
//     about the share; theirs are sampled from a softmax over the scores of those that the proxies
//     did not choose, which is nearly flat, for scores are small;
//   - sampled afresh where decoding evicts: sampled once, the spared would in the end be all there is;
//   - chunked prompts and decoding as in last_queries.hpp; one kept set for each KV head;
//   - ties: the older is evicted.
#pragma once

#include "policies/baseline/random.hpp"
#include "policies/tail/last_queries.hpp"

namespace kvlab {

struct Nacl : LastQueries {
  static constexpr PolicyInfo kInfo{
      .name = "nacl",
      .summary =
          "the least attended by the prompt's last queries is evicted first, but for some at "
          "random",
      .citation = "Chen et al. 2024, NACL, section 4 (arXiv:2408.03675)",
      .needs = Needs::mass,
      .weighted = true,
      .sinks = tokens(4),
      .recent = percent(5),
      .modifiers = {.once = true}};
  struct Params : LastQueries::Params {  // the window is of the proxies
    double random;
  };
  static constexpr Param<Params> kParams[] = {
      {"proxy", "last queries that judge", &Params::window, 32, 1, 65536},
      {"random", "share of the budget kept at random", &Params::random, 0.35, 0, 1}};

  /// The spared are those whose sample is below the share of the live tokens that may stay at
  /// random.
  static constexpr std::uint64_t rank(const Slot& slot, Token token, const Params& params,
                                      const Step& step) {
    const double stay = step.budget < step.live ? step.budget : step.live;
    const std::uint64_t share = share32(params.random * stay / (step.live > 0 ? step.live : 1));
    const bool spared = (Random::sample(token.position, step) >> 32) < share;
    return slot.mass | (spared ? std::uint64_t{1} << 55 : 0);
  }
};

}  // namespace kvlab
