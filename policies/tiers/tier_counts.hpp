// Counts the tokens on each tier of a tier plan. The counts do not depend on ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {

class TierCounts {
 public:
  explicit TierCounts(std::vector<TierSlots> tier_plan) : tier_plan_(std::move(tier_plan)) {}

  /// Whether the next append has to evict tokens, or to demote tokens from a full first tier.
  bool needs_eviction(const Modifiers& modifiers, std::uint32_t budget, bool after_prompt) const {
    return budget != kNoBudget &&
           (modifiers.surplus(tokens(), budget, after_prompt) > 0 ||
            modifiers.surplus(tokens_[0], tier_plan_[0].slots, after_prompt) > 0);
  }
  /// Evicts and demotes as AgedSet does. Returns the number of evicted tokens.
  std::uint32_t evict_to_budget(const Modifiers& modifiers, std::uint32_t budget,
                                bool after_prompt) {
    if (!needs_eviction(modifiers, budget, after_prompt)) return 0;
    const bool evicts = modifiers.surplus(tokens(), budget, after_prompt) > 0;
    const std::uint32_t waiting = evicts ? 0 : std::max(tokens(), budget - 1) - (budget - 1);
    std::uint32_t over = 0;
    for (std::size_t r = 0; r < tier_plan_.size(); ++r) {
      const std::uint32_t own = tokens_[r] + over;
      tokens_[r] = std::min(tier_plan_[r].slots + (r == 0 ? waiting - 1 : 0), own);
      over = own - tokens_[r];
    }
    return over;
  }
  void append(std::uint32_t tokens) { tokens_[0] += tokens; }

  const std::vector<TierSlots>& tier_plan() const { return tier_plan_; }
  std::uint32_t on(std::size_t tier) const { return tokens_[tier]; }
  std::uint32_t tokens() const { return std::accumulate(tokens_.begin(), tokens_.end(), 0u); }

 private:
  std::vector<TierSlots> tier_plan_;
  std::vector<std::uint32_t> tokens_ = std::vector<std::uint32_t>(tier_plan_.size());
};

}  // namespace kvlab
