// The live tokens of one cache by age, under the one rule of eviction: positions and states lie one
// after another, so that a policy's hooks run as vector loops.
//
// The base of whoever keeps something beside them: LiveSet a slot for each, AgedCache the bits that
// the configuration batches look at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/modifiers/ranks.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {
class LayerBudgets;  // policies/budgets/layer_budgets.hpp

class AgedSet {
 public:
  /// Which cache this is: enters Step, hence `random`.
  struct Identity {
    std::uint64_t seed = 0;
    std::uint32_t sequence = 0, layer = 0, kv_head = 0;
  };

  /// Live tokens from the oldest to the youngest.
  std::span<const std::uint32_t> positions() const { return {positions_.data(), size_}; }
  std::uint32_t size() const { return size_; }
  std::uint64_t evictions() const { return evictions_; }
  std::uint32_t live_max() const { return live_max_; }

  Needs needs() const { return ops_.info.needs; }
  /// Whether the policy looks at each query head.
  bool sees_heads() const { return ops_.observe_heads != nullptr; }
  /// The weight of the query that has `age` younger ones in its append.
  float weight(std::uint32_t age) const { return ops_.weight(age, params_.data()); }
  /// Weights are 0 from this age on; kNoTail: never.
  std::uint32_t tail() const { return ops_.tail(params_.data()); }

  /// Names of what a token brings when it is appended, in order.
  const std::vector<std::string>& features() const { return features_; }
  /// What the live tokens brought, [age, features()].
  std::span<const float> feature_values() const {
    return std::span(feature_values_).first(size_ * features_.size());
  }

  /// The state of the token at an age; padding may be anything.
  std::span<const std::byte> state(std::size_t age) const {
    return std::span(states_).subspan(age * ops_.slot_bytes, ops_.slot_bytes);
  }
  /// Whether that is the state that `other` are the bytes of, but for padding.
  bool has_state(std::size_t age, std::span<const std::byte> other) const;

  /// Before the first token: the slots of the tiers of a plan, which come to the budget. Tokens are
  /// appended to the first.
  void keep_at(std::vector<TierSlots> tiers) {
    if (tiers.empty() || tiers.size() > kMaxTiers)
      throw std::logic_error("a cache: too many tiers");
    tier_plan_ = std::move(tiers);
    tier_counts_.assign(tier_plan_.size() + 1, 0);
  }
  /// The format of the token at an age, once its append has ended.
  const KvFormat& format(std::size_t age) const { return *tier_plan_[tier(age)].format; }
  std::size_t tier(std::size_t age) const { return tiers_.empty() ? 0 : tiers_[age]; }
  /// By age; empty of one tier.
  std::span<const std::uint8_t> tiers() const {
    return std::span(tiers_).first(tiers_.empty() ? 0 : size_);
  }
  std::span<const TierSlots> tier_plan() const { return tier_plan_; }
  /// Whether some tier is quantized.
  bool is_quantized() const { return !tier_plan_.back().format->exact(); }

  /// How many tokens have to be evicted before the next append.
  std::uint32_t surplus() const {
    return budget_ == kNoBudget ? 0 : modifiers_.surplus(size_, budget_, after_prompt_);
  }
  const Modifiers& modifiers() const { return modifiers_; }
  /// Most tokens that are live where they come one at a time; 2^64 - 1: as many as come.
  std::uint64_t capacity() const {
    const bool bounded = budget_ != kNoBudget && !modifiers_.once;
    return bounded ? modifiers_.capacity(budget_, 1) : ~std::uint64_t{0};
  }
  /// The policy's ranks by age, were `now` appended next; no modifier has touched them.
  Ranks ranks(std::uint32_t now) const;
  /// The place of each live token, by age, in the eviction order, were `now` appended next.
  std::vector<EvictionKey> eviction_keys(std::uint32_t now) const;

  /// Step 4: what the live tokens received from the last append, as arrays or one by one, by
  /// age. `heads`: of a policy that looks at each.
  void observe(const Seen& seen);
  void observe(std::span<const Observation> seen, std::span<const std::uint64_t> heads = {});
  /// Why the cache cannot go back to its first `tokens` tokens; empty if it can.
  std::string crop_obstacle(std::uint32_t tokens) const;
  /// The last append was the end of a prompt segment.
  void end_prompt() { after_prompt_ = true; }
  bool after_prompt() const { return after_prompt_; }

  /// Under scope=layer, before tokens are evicted for the first time: what the layer's caches
  /// share.
  void share(std::shared_ptr<LayerRanks> layer) { layer_ = std::move(layer); }
  /// Likewise of a set that shares slots.
  void share(std::shared_ptr<LayerBudgets> layer) { layer_budgets_ = std::move(layer); }
  /// From a prompt's end on, the budget is a mean over the KV heads of the layer: under ada().
  void share_slots() { shares_slots_ = true; }
  bool shares_slots() const { return shares_slots_; }
  /// In tokens; under ada() the mean until a prompt has ended. kNoBudget: never evicts.
  std::uint32_t budget() const { return budget_; }
  /// What share() was given; null where each evicts by itself.
  const LayerBudgets* layer_budgets() const { return layer_budgets_.get(); }

 protected:
  /// `budget` in tokens. `protected_tokens` of a policy that never evicts are not looked at.
  AgedSet(const PolicySpec& spec, std::uint32_t budget, ProtectedTokens protected_tokens,
          Identity identity);
  /// A set under other hooks than the registry's: for oracles.
  AgedSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget,
          ProtectedTokens protected_tokens, Identity identity,
          std::vector<std::string> features = {});

  /// Step 1: which token is evicted, were `now` appended next, so that at most budget - 1 are live:
  /// ages, ascending. Until the next call.
  std::span<const std::uint32_t> choose_victims(std::uint32_t now) {
    if (shares_slots_ || tier_plan_.size() > 1) return find_victims(now);
    return surplus() == 1 && evicts_by_own_rank() ? find_victim(now) : find_victims(now);
  }
  /// The rule as it is written: the first by eviction_keys(). Of a tier plan, who finds no room;
  /// the others have been demoted.
  std::span<const std::uint32_t> find_victims(std::uint32_t now);
  /// find_victims() where one leaves by its own rank: one vector loop over the tokens that no
  /// protection holds.
  std::span<const std::uint32_t> find_victim(std::uint32_t now);
  /// Takes the tokens of these ages out, ascending.
  void evict(std::span<const std::uint32_t> ages);
  /// Step 2: appends `count` tokens from position `first` on. `brought` [count, features()]: what
  /// they bring; null where that is nothing. Throws std::logic_error where it is not.
  void append(std::uint32_t first, std::uint32_t count, const float* feature_values = nullptr);
  /// Drops the youngest tokens as if they had not come. Only without a crop_obstacle().
  void drop_youngest(std::uint32_t count);
  /// Gives back the memory of tokens that have left.
  void give_back();

 private:
  Step step(std::uint32_t now, std::uint32_t queries) const;
  std::byte* slot(std::size_t age) { return states_.data() + age * ops_.slot_bytes; }
  Tokens tokens() const {
    return {positions_.data(), features_.empty() ? nullptr : feature_values_.data()};
  }
  void reserve(std::size_t count);
  bool evicts_by_own_rank() const {
    return modifiers_.scope == Modifiers::Scope::head && !modifiers_.smooths(after_prompt_);
  }
  /// Whether the first tier is full for the next append.
  bool needs_demotion() const;
  void demote(std::uint32_t age);
  /// Of a tier, were somebody to leave it.
  static constexpr std::uint32_t kNoAge = ~0u;
  struct First {
    std::uint32_t age = kNoAge;
    EvictionKey key{~0u, ~std::uint64_t{0}, ~0u};
  };
  std::vector<First> firsts(std::uint32_t now) const;
  bool assign_one(std::uint32_t now, bool evicts);
  void assign_tiers(bool evicts);
  std::pair<std::size_t, std::size_t> unprotected_range(std::uint32_t now) const;
  Ranks modified_ranks(std::uint32_t now) const;
  void fill_keys(std::uint32_t now, std::vector<EvictionKey>& keys) const;

  PolicyOps ops_;
  std::vector<std::byte> params_;
  std::uint32_t budget_;
  ProtectedTokens protected_tokens_;
  Modifiers modifiers_;
  std::shared_ptr<LayerRanks> layer_;            // under scope=layer
  std::shared_ptr<LayerBudgets> layer_budgets_;  // under ada()
  Identity identity_;
  std::vector<std::uint32_t> positions_;  // [age], with room to spare
  std::vector<std::byte> states_;         // [age, slot_bytes], likewise
  std::vector<std::string> features_;
  std::vector<float> feature_values_;  // [age, features_], likewise
  std::vector<TierSlots> tier_plan_ = {TierSlots{}};
  static_assert(kMaxTiers < 0xff);          // an evicted token's is one more than the last
  std::vector<std::uint8_t> tiers_;         // [age], likewise; empty where there is one tier
  std::vector<std::uint32_t> tier_counts_;  // [tier]: how many
  std::vector<std::uint32_t> victims_;
  std::vector<EvictionKey> keys_;
  std::uint32_t size_ = 0, live_max_ = 0, appended_first_ = 0, appended_count_ = 0;
  bool after_prompt_ = false, shares_slots_ = false;
  std::uint64_t evictions_ = 0;
  std::uint32_t evicted_at_ = 0;  // how many tokens had come at the last eviction
};

// The live tokens of one cache, and a slot for each. Knows no keys and no values: slots are
// numbers, and whoever holds tensors stores a token's key and value at its slot.

/// How many live tokens, the oldest ones, have lost a younger one. `positions`: ascending.
std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions);

class LiveSet : public AgedSet {
 public:
  /// `budget` in tokens. Throws std::invalid_argument where the protected tokens do not fit the
  /// budget.
  LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity);
  /// A set under other hooks than the registry's, whose parameters are `params`.
  LiveSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget,
          ProtectedTokens protected_tokens, Identity identity)
      : AgedSet(ops, std::move(params), budget, protected_tokens, identity) {}

  /// By age.
  std::span<const std::uint32_t> slots() const { return slots_; }
  /// One more than the largest slot ever used.
  std::uint32_t slot_count() const { return slot_count_; }

  /// Step 1: evicts until at most budget - 1 tokens are live; `now` is the position to be appended
  /// next. Returns the victims' ages, ascending, as they were before the eviction.
  std::span<const std::uint32_t> evict_to_budget(std::uint32_t now);
  /// Step 2: appends `count` tokens from position `first` on, as AgedSet does. Reuses freed slots
  /// first.
  void append(std::uint32_t first, std::uint32_t count, const float* feature_values = nullptr);
  /// Goes back to the first `tokens` tokens. Throws std::logic_error for a crop_obstacle().
  void crop(std::uint32_t tokens);
  /// Numbers the slots 0, 1, 2, … by age and gives back the memory of tokens that have left.
  /// Returns which slots they were, by age.
  std::vector<std::uint32_t> renumber();

 private:
  std::vector<std::uint32_t> slots_, free_;
  std::uint32_t slot_count_ = 0;
};

}  // namespace kvlab
