// Counts the tokens on each tier of a tier plan. The counts can be computed without ranks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "policies/rule/tier_assignment.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {

class TierCounts {
 public:
  explicit TierCounts(std::vector<TierSlots> tier_plan) : tier_plan_(std::move(tier_plan)) {
    for (const TierSlots& tier : tier_plan_) tiers_.push_back({0, tier.slots});
  }

  /// Whether the next append has to evict tokens, or to demote tokens from a full first tier.
  bool needs_eviction(const Modifiers& modifiers, std::uint32_t budget, bool after_prompt) const {
    return budget != kNoBudget && (modifiers.surplus(tokens(), budget, after_prompt) > 0 ||
                                   is_first_tier_full(tiers_[0], modifiers, after_prompt));
  }
  /// Evicts and demotes the same numbers of tokens as AgedSet. Returns the number of evicted
  /// tokens.
  std::uint32_t evict_to_budget(const Modifiers& modifiers, std::uint32_t budget,
                                bool after_prompt) {
    if (!needs_eviction(modifiers, budget, after_prompt)) return 0;
    const bool evicts = modifiers.surplus(tokens(), budget, after_prompt) > 0;
    return assign_counts(tiers_.data(), static_cast<int>(tiers_.size()),
                         waiting_tokens(tokens(), budget, evicts));
  }
  void append(std::uint32_t tokens) { tiers_[0].tokens += tokens; }
  /// For benchmarks: appends tokens and demotes at once, whatever the modifiers.
  void fill(std::uint32_t tokens) {
    append(tokens);
    assign_counts(tiers_.data(), static_cast<int>(tiers_.size()), 0);
  }

  const std::vector<TierSlots>& tier_plan() const { return tier_plan_; }
  std::uint32_t on(std::size_t tier) const { return tiers_[tier].tokens; }
  std::uint32_t tokens() const {
    std::uint32_t all = 0;
    for (const TierLoad& tier : tiers_) all += tier.tokens;
    return all;
  }

 private:
  std::vector<TierSlots> tier_plan_;
  std::vector<TierLoad> tiers_;
};

}  // namespace kvlab
