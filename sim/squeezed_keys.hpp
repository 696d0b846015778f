// Keys of a live set that is numbered 0, 1, 2, … by age at every step (positions = cache).
//
// Only differences of positions count, so the youngest token keeps its true position and every
// other one sits as many places before it as there are live tokens younger than it. A key then
// moves only when a younger token leaves, and is rotated again from its unrotated self, never in
// place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/live_set.hpp"
#include "sim/head_view.hpp"
#include "traces/numeric/panels.hpp"
#include "traces/numeric/rope.hpp"

namespace kvlab {

class SqueezedKeys {
 public:
  SqueezedKeys(const HeadView& view, const RopeTable& rope, float softmax_scale);

  /// After an admission: places every live token.
  void place(const LiveSet& live);
  /// Computes the logits of all query heads of `query` for the first `visible` live tokens by age.
  void compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible);
  /// The logits of one query head, [visible], in age order.
  std::span<const float> logits(std::uint32_t head) const;

 private:
  HeadView view_;
  const RopeTable& rope_;
  float softmax_scale_;
  Panels keys_;                        // [slot, dim], rotated to placed_[slot]
  std::vector<std::uint32_t> placed_;  // [slot]
  std::vector<std::uint32_t> tokens_;  // [slot]: which token it was placed for
  std::vector<float> queries_, by_slot_, by_age_;
  std::size_t visible_ = 0;
};

}  // namespace kvlab
