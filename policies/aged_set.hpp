// The live tokens of one cache, ordered by age, and the eviction rule. Positions and states are
// stored contiguously, so that loops over a policy's hooks can be vectorized.
//
// An append has four steps (docs/internals/architecture.md): 1. tokens are evicted to the budget;
// 2. the new tokens are added; 3. their queries attend to the live tokens; 4. the policy observes
// the attention. This file implements steps 1, 2 and 4. Step 3 is the caller's.
//
// AgedSet is the base class of two caches that store more. LiveSet also stores a slot for each
// token. AgedCache (sim/config_batches) also stores one bit for each position, which says whether
// the token is live.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/modifiers/ranks.hpp"
#include "policies/rule/eviction_order.hpp"
#include "policies/rule/tier_assignment.hpp"
#include "policies/tiers/centre_setting.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {
class LayerBudgets;  // policies/budgets/layer_budgets.hpp

class AgedSet {
 public:
  /// Identifies the cache. It is part of Step, so that the policy `random` can depend on it.
  struct Identity {
    std::uint64_t seed = 0;
    std::uint32_t sequence = 0, layer = 0, kv_head = 0;
  };

  /// Positions of the live tokens, from the oldest to the youngest.
  std::span<const std::uint32_t> positions() const { return {positions_.data(), size_}; }
  std::uint32_t size() const { return size_; }
  std::uint64_t evictions() const { return evictions_; }
  std::uint32_t live_max() const { return live_max_; }

  Needs needs() const { return ops_.info.needs; }
  /// Whether the policy observes each query head separately.
  bool sees_heads() const { return ops_.observe_heads != nullptr; }
  /// The weight of a query, where `age` is the number of younger queries in its append.
  float weight(std::uint32_t age) const { return ops_.weight(age, params_.data()); }
  /// The lowest age at which a query has weight 0; all older queries have weight 0, too. kNoTail if
  /// there is no such age.
  std::uint32_t tail() const { return ops_.tail(params_.data()); }

  /// Names of the features that each token gets when it is appended, in order.
  const std::vector<std::string>& features() const { return features_; }
  /// Features of the live tokens, [age, features()].
  std::span<const float> feature_values() const {
    return std::span(feature_values_).first(size_ * features_.size());
  }

  /// The state of the token at an age. Its padding bytes are unspecified.
  std::span<const std::byte> state(std::size_t age) const {
    return std::span(states_).subspan(age * ops_.slot_bytes, ops_.slot_bytes);
  }
  /// Whether the state of the token at an age equals `other`. Padding bytes are ignored.
  bool has_state(std::size_t age, std::span<const std::byte> other) const;

  /// Sets the tiers of a tier plan and their slots. Call it before the first token is appended. The
  /// slots must add up to the budget. New tokens are appended to the first tier.
  void keep_at(std::vector<TierSlots> tiers) {
    if (tiers.empty() || tiers.size() > kMaxTiers)
      throw std::logic_error("a cache: too many tiers");
    tier_plan_ = std::move(tiers);
    tier_loads_.clear();
    for (const TierSlots& tier : tier_plan_) tier_loads_.push_back({0, tier.slots});
    tier_loads_.push_back({0, 0});
  }
  /// Sets how keys are centred. This class only stores the setting: the owner of the key tensors
  /// subtracts the centre. Call it before the first token is appended.
  void centre_keys_at(const CentreSetting& centre) {
    centre_ = centre.kind;
    centre_constants_ = centre.constants;
  }
  KeyCentre centre() const { return centre_; }
  /// The centre of this head [dim], if centre() is KeyCentre::constants.
  std::span<const float> centre_constants() const {
    return centre_constants_->centre(identity_.layer, identity_.kv_head);
  }
  /// The format of the token at an age. It is valid once the token's append has ended.
  const KvFormat& format(std::size_t age) const { return tier_plan_[tier(age)].format; }
  std::size_t tier(std::size_t age) const { return tiers_.empty() ? 0 : tiers_[age]; }
  /// Tiers by age; empty if there is one tier.
  std::span<const std::uint8_t> tiers() const {
    return std::span(tiers_).first(tiers_.empty() ? 0 : size_);
  }
  std::span<const TierSlots> tier_plan() const { return tier_plan_; }
  /// Whether at least one tier is quantized.
  bool is_quantized() const { return !tier_plan_.back().format.exact(); }

  /// Number of tokens to evict before the next append.
  std::uint32_t surplus() const { return modifiers_.surplus(size_, budget_, after_prompt_); }
  const Modifiers& modifiers() const { return modifiers_; }
  /// Maximum number of live tokens if tokens are appended one at a time; 2^64 - 1: unbounded.
  std::uint64_t capacity() const {
    const bool bounded = budget_ != kNoBudget && !modifiers_.once;
    return bounded ? modifiers_.capacity(budget_, 1) : ~std::uint64_t{0};
  }
  /// The policy's ranks by age, without modifiers, if position `now` is appended next.
  Ranks ranks(std::uint32_t now) const;
  /// The eviction key of each live token, by age, if position `now` is appended next.
  std::vector<EvictionKey> eviction_keys(std::uint32_t now) const;

  /// Step 4 of an append: passes the observations, by age, to the policy, as arrays (Seen) or as
  /// one Observation per token. `heads`: masses by query head, for a policy that observes each
  /// head.
  void observe(const Seen& seen);
  void observe(std::span<const Observation> seen, std::span<const std::uint64_t> heads = {});
  /// The reason why the cache cannot return to its first `tokens` tokens; empty if it can.
  std::string crop_obstacle(std::uint32_t tokens) const;
  /// Call when the last append ended a prompt segment.
  void end_prompt() { after_prompt_ = true; }
  bool after_prompt() const { return after_prompt_; }

  /// With scope=layer: sets the state that the caches of a layer share. Call it before the first
  /// eviction.
  void share(std::shared_ptr<LayerRanks> layer) { layer_ = std::move(layer); }
  /// With ada(): sets the state that the caches of a layer share.
  void share(std::shared_ptr<LayerBudgets> layer) { layer_budgets_ = std::move(layer); }
  /// With ada(): makes the KV heads of the layer share their slots. Each head starts with the same
  /// budget, which is the mean. After a prompt, the shared state computes a separate budget for
  /// each head.
  void share_slots() { shares_slots_ = true; }
  bool shares_slots() const { return shares_slots_; }
  /// Budget in tokens. With ada() it is the mean until a prompt has ended, and then this head's own
  /// budget. kNoBudget: never evicts.
  std::uint32_t budget() const { return budget_; }
  /// The state that share() set; null if the cache does not share slots.
  const LayerBudgets* layer_budgets() const { return layer_budgets_.get(); }

 protected:
  /// `budget` is in tokens. `protected_tokens` are ignored if the policy never evicts.
  AgedSet(const PolicySpec& spec, std::uint32_t budget, ProtectedTokens protected_tokens,
          Identity identity);
  /// A set whose hooks are not from the registry, for oracles.
  AgedSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget,
          ProtectedTokens protected_tokens, Identity identity,
          std::vector<std::string> features = {});

  /// Step 1: chooses the tokens to evict so that at most budget - 1 are live before position `now`
  /// is appended. Returns their ages, ascending. The span is valid until the next call.
  std::span<const std::uint32_t> choose_victims(std::uint32_t now) {
    if (shares_slots_ || tier_plan_.size() > 1) return find_victims(now);
    return surplus() == 1 && evicts_by_own_rank() ? find_victim(now) : find_victims(now);
  }
  /// The general form of the rule: chooses the tokens that come first in the order of
  /// eviction_keys(). With a tier plan, chooses the tokens for which no tier has a slot, and also
  /// demotes tokens that have to move to a lower tier.
  std::span<const std::uint32_t> find_victims(std::uint32_t now);
  /// A faster form with the same result as find_victims(). It requires that exactly one token is
  /// evicted and that ranks depend on this KV head alone. Runs one vector loop over the unprotected
  /// tokens.
  std::span<const std::uint32_t> find_victim(std::uint32_t now);
  /// Removes the tokens of these ages, ascending.
  void evict(std::span<const std::uint32_t> ages);
  /// Step 2: appends `count` tokens from position `first` on. `feature_values` has shape [count,
  /// features()]; null if there are no features. Throws std::logic_error if it is null and the
  /// policy has features.
  void append(std::uint32_t first, std::uint32_t count, const float* feature_values = nullptr);
  /// Brings back one token that was evicted, with the state of a new token. `now` is the position
  /// that is appended next. `feature_values` [features()]; null if there are no features. Throws
  /// std::logic_error if it is null and the policy has features. Only for a cache with one tier.
  void bring_back(std::uint32_t position, std::uint32_t now, const float* feature_values = nullptr);
  /// Drops the `count` youngest tokens, as if they had never been appended. Requires an empty
  /// crop_obstacle().
  void drop_youngest(std::uint32_t count);
  /// Releases the memory of evicted tokens.
  void give_back();

 private:
  Step step(std::uint32_t now, std::uint32_t queries) const;
  std::byte* slot(std::size_t age) { return states_.data() + age * ops_.slot_bytes; }
  Tokens tokens() const {
    return {positions_.data(), features_.empty() ? nullptr : feature_values_.data()};
  }
  void reserve(std::size_t count);
  Eviction last_of(std::span<const std::uint32_t> victims) const;
  void take_place(std::size_t age, std::size_t count);
  void reorder(const Step& step);
  bool evicts_by_own_rank() const {
    return modifiers_.scope == Modifiers::Scope::head && !modifiers_.smooths(after_prompt_);
  }
  /// Whether the first tier is too full for the next append.
  bool needs_demotion() const;
  int tier_count() const { return static_cast<int>(tier_plan_.size()); }
  void demote(std::uint32_t age, int tier);
  std::vector<EvictionCandidate> firsts(std::uint32_t now) const;
  bool assign_one(std::uint32_t now);
  void assign_tiers(bool evicts);
  std::pair<std::size_t, std::size_t> unprotected_range(std::uint32_t now) const;
  Ranks modified_ranks(std::uint32_t now) const;
  void fill_keys(std::uint32_t now, std::vector<EvictionKey>& keys) const;

  PolicyOps ops_;
  std::vector<std::byte> params_;
  std::uint32_t budget_;
  ProtectedTokens protected_tokens_;
  Modifiers modifiers_;
  std::shared_ptr<LayerRanks> layer_;            // with scope=layer
  std::shared_ptr<LayerBudgets> layer_budgets_;  // with ada()
  Identity identity_;
  std::vector<std::uint32_t> positions_;  // [age]; has spare capacity
  std::vector<std::byte> states_;         // [age, slot_bytes]; has spare capacity
  std::vector<std::string> features_;
  std::vector<float> feature_values_;  // [age, features_]; has spare capacity
  std::vector<TierSlots> tier_plan_ = {TierSlots{}};
  KeyCentre centre_ = KeyCentre::none;
  std::shared_ptr<const CentreConstants> centre_constants_;  // null unless centre_ is constants
  // In tiers_, the number of tiers marks an evicted token, so this number has to fit into a byte.
  static_assert(kMaxTiers < 0xff);
  std::vector<std::uint8_t> tiers_;  // [age]; has spare capacity; empty if there is one tier
  // [tier]. One more entry, after the last tier, counts the tokens that demote() evicts.
  std::vector<TierLoad> tier_loads_;
  std::vector<std::uint32_t> victims_;
  std::vector<EvictionKey> keys_;
  std::uint32_t size_ = 0, live_max_ = 0, appended_first_ = 0, appended_count_ = 0;
  bool after_prompt_ = false, shares_slots_ = false;
  std::uint64_t evictions_ = 0;
  std::uint32_t newest_ = 0;  // position of the token that was appended last
  // The eviction since the last append; only for a policy that has the hook evicted().
  std::optional<Eviction> eviction_;
  std::uint32_t evicted_at_ = 0;  // number of tokens that had been appended at the last eviction
};

/// Number of live tokens that are older than some evicted token; these tokens come before the last
/// gap in the positions. `positions`: ascending.
std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions);

/// The live tokens of one cache, with a slot number for each. LiveSet stores no keys and values:
/// the owner of the tensors stores a token's key and value at its slot.
class LiveSet : public AgedSet {
 public:
  /// `budget` is in tokens. Throws std::invalid_argument if the protected tokens do not fit the
  /// budget.
  LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity);
  /// A set whose hooks are not from the registry. `params` are the parameters of these hooks.
  LiveSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget,
          ProtectedTokens protected_tokens, Identity identity)
      : AgedSet(ops, std::move(params), budget, protected_tokens, identity) {}

  /// Slots by age.
  std::span<const std::uint32_t> slots() const { return slots_; }
  /// One more than the largest slot ever used.
  std::uint32_t slot_count() const { return slot_count_; }

  /// Step 1: evicts until at most budget - 1 tokens are live. `now` is the position that is
  /// appended next. Returns the victims' ages before the eviction, ascending.
  std::span<const std::uint32_t> evict_to_budget(std::uint32_t now);
  /// Step 2: see AgedSet::append(). Also gives each token a slot; freed slots are reused first.
  void append(std::uint32_t first, std::uint32_t count, const float* feature_values = nullptr);
  /// Drops all tokens except the first `tokens` of the text. If that is not possible, throws
  /// std::logic_error with the text of crop_obstacle().
  void crop(std::uint32_t tokens);
  /// Renumbers the slots 0, 1, 2, … by age and releases the memory of evicted tokens. Returns the
  /// old slots, by age.
  std::vector<std::uint32_t> renumber();

 private:
  std::vector<std::uint32_t> slots_, free_;
  std::uint32_t slot_count_ = 0;
};

}  // namespace kvlab
