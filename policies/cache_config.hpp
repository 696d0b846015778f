// What a cache is to do: as it was requested, and what that comes to for one sequence.
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

/// A cache as requested: on the command line, in policy.json, of a replay, a loop or a decoder.
struct CacheConfig {
  PolicySpec policy = parse_policy("full");
  Budget budget{.all = true};
  Prefill prefill = {};
  Positions positions = Positions::original;
  std::uint64_t seed = 0;
  double threshold = 0.01;  ///< tau, of requests

  /// The same for a sequence that begins with a prompt of so many tokens.
  CacheConfig at_prompt(std::uint32_t tokens) const;

  /// Whether tokens ever leave: not under `full`. A reference evicts.
  bool evicts() const { return !policy.entry || policy.entry->info.evicts; }
  bool is_full() const {
    return !evicts() && positions == Positions::original && !policy.tier_plan.is_quantized();
  }
  /// The budget as requested; "all" where nothing leaves.
  std::string budget_text() const { return evicts() ? budget.text() : "all"; }
  /// The budget in tokens of 16 bit, at least 1, of a sequence of so many tokens.
  std::uint32_t budget_in_tokens(std::uint32_t length, std::uint32_t head_size) const {
    return budget.resolve(length, head_size, min_token_bytes(head_size));
  }
  Budget budget_at_length(std::uint32_t length, std::uint32_t head_size) const {
    return budget.at_length(length, head_size, min_token_bytes(head_size));
  }
  /// Of a token within the budget. (Where heads differ, their budgets are in tokens of 16 bit.)
  std::uint64_t min_token_bytes(std::uint32_t head_size) const {
    return budget.is_even() ? policy.tier_plan.min_token_bytes(head_size)
                            : kv_bytes_per_token(head_size);
  }
  /// Whether the KV heads of a layer keep one set, or share their slots: which token is evicted is
  /// found for all of them.
  bool evicts_by_layer() const {
    return policy.modifiers.scope == Modifiers::Scope::layer || shares_slots();
  }
  /// A reference does not; a policy does under ada().
  bool shares_slots() const {
    return policy.entry && evicts() && budget.split == Budget::Split::ada;
  }
};

/// Gets a line about a configuration that is left out.
using LeaveOut = std::function<void(const std::string&)>;

/// The configurations that `check` takes. One whose budget is too small (BudgetTooSmall) is left
/// out with a line; the error goes through where none that evicts would be left, or `leave_out` is
/// null.
std::vector<CacheConfig> configs_that_fit(std::vector<CacheConfig> configs,
                                          const std::function<void(const CacheConfig&)>& check,
                                          const LeaveOut& leave_out);

/// `configs` behind the full cache, which is put there if it is not among them.
std::vector<CacheConfig> with_full_first(std::vector<CacheConfig> configs);

/// Tokens that enter a cache together.
struct Append {
  std::uint32_t first, tokens;
  bool ends_prompt = false;  ///< the last one of a prompt segment
  bool decodes = false;      ///< of a decode segment
};

/// A configuration for a sequence of known length.
struct ResolvedConfig : CacheConfig {
  std::uint32_t sequence = 0;               ///< which one of a run: random samples depend on it too
  std::uint32_t budget_tokens = kNoBudget;  ///< the largest; kNoBudget: nothing is evicted
  ProtectedTokens protected_tokens = {};    ///< of that budget
  HeadBudgets head_budgets = {};            ///< empty: all heads have budget_tokens
  /// As requested, in tokens of 16 bit, a mean over heads; kNoBudget: nothing is evicted.
  std::uint32_t requested_tokens = kNoBudget;
  std::vector<std::uint32_t> layer_numbers = {};  ///< as the model counts; empty: 0, 1, 2, …
  std::map<std::uint32_t, std::vector<TierSlots>> tiers = {};  ///< by budget; empty: one plain tier
  std::vector<Append> appends = {};        ///< where they are known beforehand: in a replay
  std::vector<bool> in_dense_prompt = {};  ///< [token], likewise

  BringFeatures brings = nullptr;  ///< of find_features(); null: none that is not computed

  /// By layer: where it is not 0, the model sees that many tokens, and just these are kept,
  /// whatever is requested. Empty: no such layers.
  std::vector<std::uint32_t> windows = {};

  std::uint32_t window_of(std::uint32_t layer) const {
    return windows.empty() ? 0 : windows[layer];
  }
  /// Whether all tokens of the layer stay, in 16 bit, whatever is asked of the others.
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
  /// What the prompt's tokens bring a KV head that is not computed. Those after it bring zeros:
  /// they stay.
  void bring(std::uint32_t layer, std::uint32_t kv_head, FeaturesByName& to) const {
    if (brings && window_of(layer) == 0) brings(identity(layer, kv_head).layer, kv_head, to);
  }
  /// What one KV head alone does: budget_tokens and protected tokens are its own; full in an exempt
  /// layer.
  ResolvedConfig of_head(std::uint32_t layer, std::uint32_t kv_head) const;
  /// The empty cache of one KV head. Throws std::invalid_argument where the protected tokens do not
  /// fit its budget.
  LiveSet live_set(std::uint32_t layer, std::uint32_t kv_head) const {
    if (const std::uint32_t window = window_of(layer); window > 0)
      return {parse_policy("window"), window, identity(layer, kv_head)};
    if (exempts(layer)) return {parse_policy("full"), kNoBudget, identity(layer, kv_head)};
    LiveSet live{policy, budget_of(layer, kv_head), identity(layer, kv_head)};
    if (shares_slots()) live.share_slots();
    if (const auto own = tiers.find(live.budget()); own != tiers.end()) live.keep_at(own->second);
    return live;
  }
};

/// `config` for a sequence of at most `length` tokens in a model of such heads, which may be left
/// out where the budget is even and not in bytes. Throws std::invalid_argument where the protected
/// tokens do not fit a budget, or budgets by head not the model.
ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence = 0,
                       const CacheShape& model = {});

/// Finds the features that no decoder computes, of the prompt with these ids, where the policy has
/// a source of them. Throws std::invalid_argument as that does, and where decoded tokens may be
/// evicted.
void find_features(ResolvedConfig& config, std::span<const std::int32_t> prompt,
                   const CacheShape& model);

}  // namespace kvlab
