// A cache that remembers the probability of each token under each query for which the token was
// live. From these probabilities, the formulas of policies are computed as their papers write them.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "sim/replay.hpp"

namespace kvlab::papers {

inline constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;

/// The probabilities of the live tokens under one query.
struct Query {
  std::vector<std::vector<float>> p;  ///< [query head][token]; 0 where a token was not seen
  std::vector<bool> seen, requested;  ///< [token]
  /// The sum over query heads of weight · p. Each term is rounded to units of 2^-32.
  std::uint64_t mass(std::uint32_t token, float weight = 1) const;
};

/// A finished append.
struct Done {
  std::uint32_t first, count;
  std::uint32_t last() const { return first + count - 1; }
  /// The number of queries after `query` in the append.
  std::uint32_t age(std::uint32_t query) const { return last() - query; }
};

struct History {
  std::vector<Query> queries;  ///< [position]
  std::vector<Done> appends;
};

/// The state of the cache when tokens are evicted.
struct Moment {
  std::uint32_t now, budget, live;
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
};

/// A token's worth. The token with the smallest worth is evicted first. Worths are compared by
/// their first numbers and, if these are equal, by their second numbers.
using Worth = std::pair<double, double>;
using Formula = std::function<Worth(const History&, std::uint32_t token, const Moment&)>;

/// The kept set at each query of one KV head, if the eviction rule ranks tokens by `formula`. Of
/// the policy in `config`, only the protected tokens are used, not the ranks.
std::vector<std::vector<std::uint32_t>> kept_by(const Formula& formula, const TraceReader& trace,
                                                std::uint32_t sequence, const CacheConfig& config,
                                                std::uint32_t layer, std::uint32_t kv_head);

}  // namespace kvlab::papers
