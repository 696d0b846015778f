// snapkv: the token that the prompt's last queries, the observation window, attend to least leaves
// first; the window's own tokens stay, but for the oldest of them: `recent=32` counts the token
// that is to come, so it protected tokens 31 of the 32 (`recent=33` protected tokens all).
//
// Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before Generation", section 4; window
// and pooling of the authors' code: 32 queries, mean over 5 neighbours, chosen once, after the
// prompt. These are its own modifiers; `snapkv:once=no:smooth=0` goes on evicting while it decodes,
// and memory has one bound.
// Deliberate differences from it:
//   - one kept set for each KV head, by the sum over its group's query heads; theirs is one for
//     each query head;
//   - a prompt in chunks of fewer queries, and decoding where it evicts, forget in the measure that
//     they are observed (last_queries.hpp): the paper has only a prompt in one piece;
//   - the budget counts the query itself; ties: the older is evicted.
#pragma once

#include "policies/tail/last_queries.hpp"

namespace kvlab {

struct SnapKV : LastQueries {
  static constexpr PolicyInfo kInfo{
      .name = "snapkv",
      .summary = "the least attended by the prompt's last queries is evicted first",
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
