// How many tokens are on each rung of a ladder: that depends on nobody's rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "policies/rungs/ladder.hpp"

namespace kvlab {

class RungCounts {
 public:
  explicit RungCounts(std::vector<RungSlots> ladder) : ladder_(std::move(ladder)) {}

  /// Whether room is made, by some who leave or where the first rung is full.
  bool makes_room(const Modifiers& modifiers, std::uint32_t budget, bool after_prompt) const {
    return budget != kNoBudget &&
           (modifiers.surplus(tokens(), budget, after_prompt) > 0 ||
            modifiers.surplus(tokens_[0], ladder_[0].slots, after_prompt) > 0);
  }
  /// Makes it, as AgedSet does. Returns how many left.
  std::uint32_t make_room(const Modifiers& modifiers, std::uint32_t budget, bool after_prompt) {
    if (!makes_room(modifiers, budget, after_prompt)) return 0;
    const bool leaving = modifiers.surplus(tokens(), budget, after_prompt) > 0;
    const std::uint32_t waiting = leaving ? 0 : std::max(tokens(), budget - 1) - (budget - 1);
    std::uint32_t over = 0;
    for (std::size_t r = 0; r < ladder_.size(); ++r) {
      const std::uint32_t own = tokens_[r] + over;
      tokens_[r] = std::min(ladder_[r].slots + (r == 0 ? waiting - 1 : 0), own);
      over = own - tokens_[r];
    }
    return over;
  }
  void admit(std::uint32_t tokens) { tokens_[0] += tokens; }

  const std::vector<RungSlots>& ladder() const { return ladder_; }
  std::uint32_t on(std::size_t rung) const { return tokens_[rung]; }
  std::uint32_t tokens() const { return std::accumulate(tokens_.begin(), tokens_.end(), 0u); }

 private:
  std::vector<RungSlots> ladder_;
  std::vector<std::uint32_t> tokens_ = std::vector<std::uint32_t>(ladder_.size());
};

}  // namespace kvlab
