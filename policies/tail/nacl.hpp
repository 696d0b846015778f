// nacl: proxy tokens and randomness. Evicts the token to which the prompt's last queries (the
// proxies) attend least. A share of the budget is filled with random tokens instead.
//
// Chen et al. 2024, "NACL: A General and Effective KV Cache Eviction Framework for LLMs at
// Inference Time", section 4 (proxy-tokens eviction, random eviction). The shares of the budget are
// those of the authors' code at a budget of 20%: 7/20 for random tokens, 1/20 for protected ones.
// Tokens are chosen once, after the prompt, through the default modifier `once` (`nacl:once=no`
// also evicts while decoding). Deliberate differences from it:
//   - the proxies are a fixed number of queries, not 1% of the prompt, because weight() does not
//     receive the prompt's length;
//   - the random tokens are sampled uniformly, each by its hash, so their number varies a little.
//     The authors sample from a softmax over the scores of the tokens that the proxies did not
//     choose, which is nearly uniform, because scores are small;
//   - if decoding evicts too, tokens are sampled again at each step. With a fixed sample, the
//     sampled tokens would be evicted last at every step, so in the end only they would be left;
//   - chunked prompts and decoding work as in last_queries.hpp; each KV head keeps one set of
//     tokens;
//   - at equal rank, the older token is evicted.
#pragma once

#include "policies/baseline/random.hpp"
#include "policies/tail/last_queries.hpp"

namespace kvlab {

struct Nacl : LastQueries {
  static constexpr PolicyInfo kInfo{
      .name = "nacl",
      .summary =
          "evicts the token with the least attention from the prompt's last queries, and keeps "
          "some at random",
      .citation = "Chen et al. 2024, NACL, section 4 (arXiv:2408.03675)",
      .needs = Needs::mass,
      .weighted = true,
      .sinks = tokens(4),
      .recent = percent(5),
      .modifiers = {.once = true}};
  struct Params : LastQueries::Params {  // `window`: number of proxies
    double random;
  };
  static constexpr Param<Params> kParams[] = {
      {"proxy", "number of last queries that are counted", &Params::window, 32, 1, 65536},
      {"random", "share of the budget kept at random", &Params::random, 0.35, 0, 1}};

  /// Keeps tokens at random: those whose sample is below `random` times the share of live tokens
  /// that the budget can keep.
  static constexpr std::uint64_t rank(const Slot& slot, Token token, const Params& params,
                                      const Step& step) {
    const double stay = step.budget < step.live ? step.budget : step.live;
    const std::uint64_t share = share32(params.random * stay / (step.live > 0 ? step.live : 1));
    const bool spared = (Random::sample(token.position, step) >> 32) < share;
    return slot.mass | (spared ? std::uint64_t{1} << 55 : 0);
  }
};

}  // namespace kvlab
