// How one layer computes attention: window, soft cap, RoPE, scale and sinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "traces/base/numeric/rope.hpp"

namespace kvlab {

struct RowSpec {
  std::uint32_t window = 0;       ///< tokens that a query sees, including its token; 0: all
  float softcap = 0;              ///< scores become softcap * tanh(score / softcap); 0: unchanged
  std::uint32_t table = 0;        ///< index of `rope` among the trace's rotation tables
  float scale = 0;                ///< factor of the products of queries and keys
  Rope rope = {};                 ///< a frequency of 0 leaves its two dimensions unrotated
  std::vector<float> sinks = {};  ///< [query_heads]: sink logits, which belong to no token; or
                                  ///< empty if there are none

  /// Whether attention is plain softmax over the tokens that a query sees.
  bool is_plain() const { return softcap == 0 && sinks.empty(); }
  /// Sink logits of a KV head's query heads, [group], or null.
  const float* sinks_of(std::uint32_t kv_head, std::uint32_t group) const {
    return sinks.empty() ? nullptr : &sinks[std::size_t{kv_head} * group];
  }
};

/// The oldest token that the query at `position` sees.
constexpr std::uint32_t first_seen(std::uint32_t window, std::uint32_t position) {
  return window == 0 || position < window ? 0 : position + 1 - window;
}

/// Converts products of a query with keys to scores: scales them, then caps them.
void make_scores(float* products, std::size_t count, float scale, float softcap);

/// The sum of a row's exponentials, including the sink's exponential `sink` (0 if there is no
/// sink). Both are multiplied by 2^-shift.
struct RowSum {
  float sum = 0, sink = 0;
  std::int32_t shift = 0;
};

/// Writes the exponentials of the scores to `e`, and returns their sum, including the exponential
/// of the sink logit `*sink`. If `sink` is null, there is no sink. In place (e == scores) is
/// allowed. The sink is added last, so that the other terms keep their order of summation.
RowSum row_exponentials(const float* scores, std::size_t count, const float* sink, float* e);

}  // namespace kvlab
