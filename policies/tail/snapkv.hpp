// snapkv: evicts the token to which the prompt's last queries (the observation window) attend
// least. Tokens of the window are kept except the oldest: `recent=32` includes the next token, so
// it protects 31 of the 32 (`recent=33` protects all).
//
// Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before Generation", section 4. Window
// and pooling are those of the authors' code: 32 queries, mean over 5 neighbours, chosen once,
// after the prompt. These are default modifiers; `snapkv:once=no:smooth=0` also evicts while
// decoding, so memory is bounded. Deliberate differences from it:
//   - each KV head keeps one set of tokens, by the sum over its group's query heads; the authors'
//     code keeps one set for each query head;
//   - in a prompt with chunks of fewer than 32 queries, and if decoding evicts, new queries scale
//     down the attention of older ones (last_queries.hpp); the paper only has a prompt in one
//     piece;
//   - the budget includes the query's token; at equal rank, the older token is evicted.
#pragma once

#include "policies/tail/last_queries.hpp"

namespace kvlab {

struct SnapKV : LastQueries {
  static constexpr PolicyInfo kInfo{
      .name = "snapkv",
      .summary = "evicts the token with the least attention from the prompt's last queries",
      .citation = "Li et al. 2024, SnapKV, section 4 (arXiv:2404.14469)",
      .needs = Needs::mass,
      .weighted = true,
      .recent = tokens(32),
      .modifiers = {.once = true, .smooth = 2}};
  static constexpr Param<Params> kParams[] = {
      {"window", "queries of the observation window", &Params::window, 32, 1, 65536}};

  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.mass;
  }
};

}  // namespace kvlab
