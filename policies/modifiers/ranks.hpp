// How modifiers process ranks before tokens are ordered: sums over a layer's KV heads, and
// smoothing by age.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policies/modifiers/modifiers.hpp"
#include "policies/rank.hpp"

namespace kvlab {

class AgedSet;

/// Ranks by age, as keys of rank_key().
struct Ranks {
  std::vector<std::uint64_t> keys;
  RankType type = RankType::whole;
};

/// Replaces every rank by the mean or maximum over the tokens at most `radius` away. Means of whole
/// numbers are rounded down. Doubles are added from the oldest to the youngest, then divided by
/// their count.
void smooth_ranks(Ranks& ranks, std::uint32_t radius, Modifiers::Pool pool);

/// The ranks that the caches of one layer share under `scope=layer`: for each token the sum from
/// the first KV head to the last. The caches hold the same tokens. All of them evict to their
/// budgets, one after another, before any of them appends more tokens.
class LayerRanks {
 public:
  /// The caches of one sequence and layer. Stores pointers: the caches must not move.
  explicit LayerRanks(std::vector<const AgedSet*> heads) : heads_(std::move(heads)) {}

  /// Summed ranks by age. The first call for `now` must come before any head has evicted for `now`;
  /// later calls for `now` return the same ranks. Throws std::logic_error if the heads hold
  /// different tokens, and std::invalid_argument if one ranks by whole numbers and another by
  /// doubles.
  const Ranks& at(std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::optional<std::uint32_t> now_;
  Ranks sums_;
};

/// Connects the caches of one sequence and layer, which must not move: by their ranks under
/// scope=layer, by their slots under ada(). Copies of connected caches are connected to each other.
/// No-op if each cache evicts by itself.
void share_ranks(std::span<AgedSet* const> heads);

}  // namespace kvlab
