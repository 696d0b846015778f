// Keys of a live set that is numbered 0, 1, 2, … by age at every step (positions = cache).
//
// Only differences of positions count, so two frames serve. A token that has lost no younger one is
// as far from the query as it ever was: key and query stay at their true positions, where logits
// are those of any other cache. An older one is rotated to its number, and the query to its own.
// Such a key is rotated again only when a token older than it leaves, from its unrotated self,
// never in place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/live_set.hpp"
#include "sim/head_view.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

class SqueezedKeys {
 public:
  SqueezedKeys(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// After an admission: places every live token.
  void place(const LiveSet& live);
  /// Computes the logits of all query heads of `query` for the first `visible` live tokens by age.
  void compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible);
  /// The logits of one query head, [visible], in age order.
  std::span<const float> logits(std::uint32_t head) const;

 private:
  void multiply_at(std::uint32_t query, std::uint32_t place, std::vector<float>& by_slot);

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  Panels keys_;                        // [slot, dim], rotated to placed_[slot]
  std::vector<std::uint32_t> placed_;  // [slot]
  std::vector<std::uint32_t> tokens_;  // [slot]: which token it was placed for
  std::uint32_t old_ = 0;              // tokens that are placed by number
  std::vector<float> queries_, by_number_, by_position_, by_age_;
  std::size_t visible_ = 0;
};

}  // namespace kvlab
