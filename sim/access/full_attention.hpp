// The attention of the full cache. It is used for pictures, and as input of simulators for other
// kinds of caches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sim/shared_rows.hpp"

namespace kvlab {

/// Which tokens count as accessed by a query head: with `top_k`, its most probable tokens;
/// otherwise, the tokens that it requests.
struct AccessRule {
  std::optional<std::uint32_t> top_k;
};

/// The attention rows of one KV head, with the same arithmetic as in a replay.
class FullAttention {
 public:
  /// Throws std::invalid_argument if the trace has no such head or the request threshold is not
  /// between 0 and 1.
  FullAttention(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                double threshold);

  /// Probabilities [count, token] of query head `head` of the group, for `count` queries from
  /// `first` on. Tokens after the query get 0.
  std::vector<float> probabilities(std::uint32_t head, std::uint32_t first, std::uint32_t count);

  /// The mean probability that the group's query heads give each token at `query`: [query + 1].
  std::vector<float> mean_row(std::uint32_t query);

  /// The earlier tokens that at least one query head of the group accesses, ordered by query, then
  /// by position.
  struct Accesses {
    std::vector<std::uint32_t> queries, tokens;
  };
  Accesses accesses(AccessRule rule, const std::vector<std::uint32_t>& queries);

 private:
  void mark_most_probable(std::uint32_t query, std::uint32_t top_k,
                          std::vector<std::uint8_t>& requested);

  HeadTensors tensors_;
  RopeTable rope_;  // of the layer
  SharedRows rows_;
};

}  // namespace kvlab
