// What the modifiers do to ranks before tokens are ordered: sums over a layer's KV heads, and
// smoothing by age.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policies/modifiers/modifiers.hpp"

namespace kvlab {

class AgedSet;

/// Every rank [age] becomes the mean, rounded down, or the maximum of those at most `places` away.
void smooth_ranks(std::vector<std::uint64_t>& ranks, std::uint32_t places, Modifiers::Pool pool);

/// The ranks that the caches of one layer share under `scope=layer`: of each token their sum over
/// the KV heads. The caches hold the same tokens, and make room one after another before any of
/// them admits more.
class LayerRanks {
 public:
  /// The caches of one sequence and layer, which stay where they are.
  explicit LayerRanks(std::vector<const AgedSet*> heads) : heads_(std::move(heads)) {}

  /// By age, before the first of the heads has made room for `now`; the others are answered as it
  /// was. Throws std::logic_error where the heads hold different tokens.
  std::span<const std::uint64_t> at(std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::optional<std::uint32_t> now_;
  std::vector<std::uint64_t> sums_;
};

/// Joins the caches of one sequence and layer, which stay where they are: under scope=layer by
/// their ranks, under ada() by their slots. Does nothing where each evicts by itself.
void share_ranks(std::span<AgedSet* const> heads);

}  // namespace kvlab
