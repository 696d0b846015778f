// What queries look at where nothing is evicted: for pictures, and for simulators of other caches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sim/shared_rows.hpp"

namespace kvlab {

/// Which tokens a query head requests: its `top_k` most probable ones, or those that it requests.
struct AccessRule {
  std::optional<std::uint32_t> top_k;
};

/// The rows of one KV head, by the replay's arithmetic.
class FullAttention {
 public:
  /// Throws std::invalid_argument where the trace has no such head, or the threshold of requests is
  /// not between 0 and 1.
  FullAttention(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                double threshold);

  /// p [count, token] of a query head of the group at queries `first` on; 0 behind the query.
  std::vector<float> probabilities(std::uint32_t head, std::uint32_t first, std::uint32_t count);

  /// What the group's query heads give each token at `query`, their mean: [token, itself included].
  std::vector<float> mean_row(std::uint32_t query);

  /// Earlier tokens that some query head of the group requests, by query, then position.
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
