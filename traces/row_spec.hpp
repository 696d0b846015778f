// How a layer's queries attend: what one row of attention is made by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "traces/base/numeric/rope.hpp"

namespace kvlab {

struct RowSpec {
  std::uint32_t window = 0;       ///< tokens that a query sees, itself included; 0: all
  float softcap = 0;              ///< scores become softcap * tanh(score / softcap); 0: they stay
  std::uint32_t table = 0;        ///< which of the trace's rotation tables `rope` is
  float scale = 0;                ///< multiplies the products
  Rope rope = {};                 ///< a frequency of 0 leaves its two dimensions as they are
  std::vector<float> sinks = {};  ///< [query_heads]: a logit that no token has; empty: none

  /// Whether plain softmax over what a query sees is all there is.
  bool is_plain() const { return softcap == 0 && sinks.empty(); }
  /// [group] of a KV head, or null.
  const float* sinks_of(std::uint32_t kv_head, std::uint32_t group) const {
    return sinks.empty() ? nullptr : &sinks[std::size_t{kv_head} * group];
  }
};

/// The oldest token that the query at `position` sees.
constexpr std::uint32_t first_seen(std::uint32_t window, std::uint32_t position) {
  return window == 0 || position < window ? 0 : position + 1 - window;
}

/// Products of a query with keys to scores: scaled, then capped.
void make_scores(float* products, std::size_t count, float scale, float softcap);

/// What a row's exponentials come to: their sum, which has the sink's own in it (0 where there is
/// none), all of them times 2^-shift.
struct RowSum {
  float sum = 0, sink = 0;
  std::int32_t shift = 0;
};

/// Exponentials of scores, and of a sink logit beside them; `sink` null: there is none. In place is
/// allowed. The sink is added last, so that what else is summed keeps its order.
RowSum row_exponentials(const float* scores, std::size_t count, const float* sink, float* e);

}  // namespace kvlab
