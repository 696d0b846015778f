// sink: StreamingLLM. Keeps the first tokens ("attention sinks") and the most recent ones.
//
// Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2.
// Deliberate differences from the authors' code:
//   - the budget includes the query's token (their cache of B tokens lets a query see B + 1);
//   - one token is evicted at each step, also between the turns of a conversation; their chat demo
//     evicts for a whole answer at once;
//   - keys are never rotated in place.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Sink {
  static constexpr PolicyInfo kInfo{
      .name = "sink",
      .summary = "evicts the oldest token, except for the attention sinks (StreamingLLM)",
      .citation = "Xiao et al. 2023, StreamingLLM, section 3.2 (arXiv:2309.17453)",
      .order = Order::nested,
      .oldest_first = true,
      .sinks = tokens(4),
      .positions = Positions::cache};
  struct Params {};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step&) {
    return token.position;
  }
};

}  // namespace kvlab
