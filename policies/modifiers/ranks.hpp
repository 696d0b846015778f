// What the modifiers do to ranks before tokens are ordered: sums over a layer's KV heads, and
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

/// Ranks by age, as rank_key() makes them.
struct Ranks {
  std::vector<std::uint64_t> keys;
  RankType type = RankType::whole;
};

/// Every rank becomes the mean, or the maximum, of those at most `radius` away: of whole numbers
/// rounded down; doubles are added from the oldest to the youngest, then divided by their number.
void smooth_ranks(Ranks& ranks, std::uint32_t radius, Modifiers::Pool pool);

/// The ranks that the caches of one layer share under `scope=layer`: of each token their sum, from
/// the first KV head to the last. The caches hold the same tokens, and evict to the budget one
/// after another before any of them appends more.
class LayerRanks {
 public:
  /// The caches of one sequence and layer, which stay where they are.
  explicit LayerRanks(std::vector<const AgedSet*> heads) : heads_(std::move(heads)) {}

  /// By age, before the first of the heads has evicted to the budget for `now`; the others are
  /// answered as it was. Throws std::logic_error where the heads hold different tokens, and
  /// std::invalid_argument where one ranks by whole numbers and another by doubles.
  const Ranks& at(std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::optional<std::uint32_t> now_;
  Ranks sums_;
};

/// Joins the caches of one sequence and layer, which stay where they are: under scope=layer by
/// their ranks, under ada() by their slots; copies of such caches join each other. Does nothing
/// where each evicts by itself.
void share_ranks(std::span<AgedSet* const> heads);

}  // namespace kvlab
