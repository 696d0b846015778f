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

/// Replaces every rank by the mean or maximum over the tokens that are at most `radius` places away
/// in the order of age. Means of whole numbers are rounded down. Doubles are added from the oldest
/// token to the youngest, then divided by their number.
void smooth_ranks(Ranks& ranks, std::uint32_t radius, Modifiers::Pool pool);

/// The ranks that the caches of one layer share with `scope=layer`: for each token, the sum of its
/// ranks from the first KV head to the last. All these caches hold the same tokens. Before any of
/// them appends more tokens, all of them evict to their budgets, one after another.
class LayerRanks {
 public:
  /// `heads`: the caches of one sequence and layer. Stores pointers to the caches, so these must
  /// not move.
  explicit LayerRanks(std::vector<const AgedSet*> heads) : heads_(std::move(heads)) {}

  /// The summed ranks by age, before position `now` is appended. The first call for a value of
  /// `now` computes them, so it must come before any head evicts. Later calls with the same value
  /// return the same ranks. Throws std::logic_error if the heads hold different tokens, and
  /// std::invalid_argument if one ranks by whole numbers and another by doubles.
  const Ranks& at(std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::optional<std::uint32_t> now_;
  Ranks sums_;
};

/// Connects the caches of one sequence and layer, which must not move: with scope=layer they share
/// ranks, with ada() they share slots. Copies of connected caches are connected to each other.
/// No-op if each cache evicts separately.
void share_ranks(std::span<AgedSet* const> heads);

}  // namespace kvlab
