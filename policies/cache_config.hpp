// The configuration of a cache: as requested (CacheConfig), and resolved for one sequence
// (ResolvedConfig).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/features/features.hpp"
#include "policies/observation.hpp"

namespace kvlab {

/// A cache as requested on the command line, in policy.json, or for a replay, an end-to-end
/// evaluation or a decoder.
struct CacheConfig {
  PolicySpec policy = parse_policy("full");
  Budget budget{.all = true};
  Prefill prefill = {};
  Positions positions = Positions::original;
  std::uint64_t seed = 0;
  double threshold = 0.01;  ///< tau, the request threshold

  /// The same configuration for a sequence whose prompt has `tokens` tokens.
  CacheConfig at_prompt(std::uint32_t tokens) const;

  /// Whether the policy evicts tokens. Only `full` does not; oracles evict.
  bool evicts() const { return !policy.entry || policy.entry->info.evicts; }
  bool is_full() const {
    return !evicts() && positions == Positions::original && !policy.tier_plan.is_quantized();
  }
  /// The budget as requested; "all" if the policy never evicts.
  std::string budget_text() const { return evicts() ? budget.text() : "all"; }
  /// The budget of a sequence of `length` tokens, in 16-bit tokens; at least 1.
  std::uint32_t budget_in_tokens(std::uint32_t length, std::uint32_t head_size) const {
    return budget.resolve(length, head_size, min_token_bytes(head_size));
  }
  Budget budget_at_length(std::uint32_t length, std::uint32_t head_size) const {
    return budget.at_length(length, head_size, min_token_bytes(head_size));
  }
  /// Bytes of one token on the smallest tier. If heads have different budgets, returns the bytes of
  /// a 16-bit token, because these budgets are counted in 16-bit tokens.
  std::uint64_t min_token_bytes(std::uint32_t head_size) const {
    return budget.is_even() ? policy.tier_plan.min_token_bytes(head_size)
                            : kv_bytes_per_token(head_size);
  }
  /// The memory of a KV head's centre, in 16-bit tokens. It counts towards the budget. A centre
  /// takes as much memory as one token, because it is one vector in float32, and a token's key and
  /// value are two vectors in 16 bit.
  std::uint32_t centre_tokens() const { return policy.centre == KeyCentre::none ? 0 : 1; }
  /// Whether victims are chosen for all KV heads of a layer together, because the heads keep the
  /// same set of tokens or share their slots.
  bool evicts_by_layer() const {
    return policy.modifiers.scope == Modifiers::Scope::layer || shares_slots();
  }
  /// Whether the KV heads of a layer share slots. This is so with ada(), except for an oracle.
  bool shares_slots() const {
    return policy.entry && evicts() && budget.split == Budget::Split::ada;
  }
};

/// A function that is called with one line about a configuration that is left out.
using LeaveOut = std::function<void(const std::string&)>;

/// Returns the configurations that `check` accepts. Leaves out a configuration for which `check`
/// throws BudgetTooSmall, and passes `leave_out` a line about it. Rethrows the error if no evicting
/// configuration would remain, or if `leave_out` is null.
std::vector<CacheConfig> configs_that_fit(std::vector<CacheConfig> configs,
                                          const std::function<void(const CacheConfig&)>& check,
                                          const LeaveOut& leave_out);

/// Returns `configs` with the full cache first. Adds the full cache if it is missing.
std::vector<CacheConfig> put_full_first(std::vector<CacheConfig> configs);

/// Tokens that are appended to a cache together.
struct Append {
  std::uint32_t first, tokens;
  bool ends_prompt = false;  ///< whether this is the last append of a prompt segment
  bool decodes = false;      ///< whether the append is part of a decode segment
};

/// A configuration for a sequence of known length.
struct ResolvedConfig : CacheConfig {
  std::uint32_t sequence = 0;  ///< index in the run; random samples depend on it
  std::uint32_t budget_tokens =
      kNoBudget;  ///< the largest budget of all heads; kNoBudget: no eviction
  ProtectedTokens protected_tokens = {};  ///< resolved for budget_tokens
  HeadBudgets head_budgets = {};          ///< empty: all heads have budget_tokens
  /// The requested budget as the mean over heads, in 16-bit tokens. With `prompt`, it counts only
  /// the tokens after the prompt. kNoBudget: no eviction.
  std::uint32_t requested_tokens = kNoBudget;
  std::vector<std::uint32_t> layer_numbers = {};  ///< layer numbers of the model; empty: 0, 1, 2, …
  /// Tier slots by budget. Empty: one 16-bit tier.
  std::map<std::uint32_t, std::vector<TierSlots>> tiers = {};
  /// [layer], for a plan by layer: the single tier of the layer. A layer with a window stores 16
  /// bit. Empty: `tiers` applies to all layers.
  std::vector<std::vector<TierSlots>> layer_tiers = {};
  std::vector<Append> appends = {};        ///< known in advance only in a replay
  std::vector<bool> in_dense_prompt = {};  ///< [token]; known in advance only in a replay

  /// Set by find_features(); null: only computed features are available.
  FeatureReader feature_reader = nullptr;

  /// Sliding window by layer, in tokens; 0: none. A layer with a window keeps exactly its window,
  /// for any budget. Empty: no layer has a window.
  std::vector<std::uint32_t> windows = {};

  std::uint32_t window_of(std::uint32_t layer) const {
    return windows.empty() ? 0 : windows[layer];
  }
  /// The tier slots of a head with this budget in a layer without a window. A plan by layer has one
  /// tier in each layer, which may be in 16 bit. Null: there is no plan for this head.
  const std::vector<TierSlots>* planned_tiers(std::uint32_t layer, std::uint32_t tokens) const {
    if (!layer_tiers.empty()) return &layer_tiers.at(layer);
    const auto own = tiers.find(tokens);
    return own == tiers.end() ? nullptr : &own->second;
  }
  /// Like planned_tiers(), but also null for a layer that a plan by layer keeps in 16 bit.
  const std::vector<TierSlots>* tiers_of(std::uint32_t layer, std::uint32_t tokens) const {
    const auto* const own = planned_tiers(layer, tokens);
    return own && !layer_tiers.empty() && own->front().format.exact() ? nullptr : own;
  }
  /// Whether the budget file exempts the layer. An exempt layer keeps all tokens in 16 bit.
  bool exempts(std::uint32_t layer) const {
    return evicts() && !head_budgets.empty() && head_budgets[layer].front() == kNoBudget;
  }
  Positions positions_of(std::uint32_t layer) const {
    return window_of(layer) > 0 || exempts(layer) ? Positions::original : positions;
  }
  std::uint32_t budget_of(std::uint32_t layer, std::uint32_t kv_head) const {
    if (window_of(layer) > 0) return window_of(layer);
    return evicts() && !head_budgets.empty() ? head_budgets[layer][kv_head] : budget_tokens;
  }
  std::uint32_t threshold16() const { return request_threshold16(threshold); }
  LiveSet::Identity identity(std::uint32_t layer, std::uint32_t kv_head) const {
    return {seed, sequence, layer_numbers.empty() ? layer : layer_numbers[layer], kv_head};
  }
  /// For one KV head: adds to `to` those features of the prompt that kvlab does not compute.
  /// Decoded tokens get zeros instead. This has no effect, because find_features() refuses policies
  /// that may evict decoded tokens.
  void add_supplied_features(std::uint32_t layer, std::uint32_t kv_head, FeaturesByName& to) const {
    if (feature_reader && window_of(layer) == 0)
      feature_reader(identity(layer, kv_head).layer, kv_head, to);
  }
  /// A key for tables of tier slots. Two heads have the same tier slots if their budgets are equal
  /// and the keys of their layers are equal. With a plan by layer, each layer has its own key;
  /// otherwise all layers have the key 0.
  std::uint32_t layer_key(std::uint32_t layer) const { return layer_tiers.empty() ? 0 : layer; }
  /// Whether heads differ in their budgets or formats. If so, use head_config() for each head.
  bool differs_by_head() const { return !head_budgets.empty() || !layer_tiers.empty(); }
  /// The configuration of one KV head, with its budget_tokens, tiers and protected tokens. Its
  /// policy is `full` in an exempt layer.
  ResolvedConfig head_config(std::uint32_t layer, std::uint32_t kv_head) const;
  /// The empty cache of one KV head. Throws std::invalid_argument if the protected tokens do not
  /// fit its budget.
  LiveSet live_set(std::uint32_t layer, std::uint32_t kv_head) const {
    if (const std::uint32_t window = window_of(layer); window > 0)
      return {parse_policy("window"), window, identity(layer, kv_head)};
    if (exempts(layer)) return {parse_policy("full"), kNoBudget, identity(layer, kv_head)};
    LiveSet live{policy, budget_of(layer, kv_head), identity(layer, kv_head)};
    if (shares_slots()) live.share_slots();
    if (const auto* const own = tiers_of(layer, live.budget())) {
      live.keep_at(*own);
      live.centre_keys_at(policy.centre);
    }
    return live;
  }
};

/// Resolves `config` for a sequence of at most `length` tokens in a model of shape `model`. `model`
/// may be left out if all heads have the same budget and it is not in bytes. Throws
/// std::invalid_argument if the protected tokens do not fit a budget, or if budgets by head do not
/// match the model.
ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence = 0,
                       const CacheShape& model = {});

/// If the policy has a FeatureSource, gets from it those features of this prompt that no decoder
/// computes. Throws std::invalid_argument if the source does, or if decoded tokens may be evicted.
void find_features(ResolvedConfig& config, std::span<const std::int32_t> prompt,
                   const CacheShape& model);

}  // namespace kvlab
