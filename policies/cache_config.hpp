// What a cache is to do: as it was asked for, and what that comes to for one sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/columns/columns.hpp"
#include "policies/observation.hpp"

namespace kvlab {

/// A cache as asked for: on the command line, in policy.json, of a replay, a loop or a decoder.
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
    return !evicts() && positions == Positions::original && !policy.ladder.is_coded();
  }
  /// The budget as asked for; "all" where nothing leaves.
  std::string budget_text() const { return evicts() ? budget.text() : "all"; }
  /// The budget in tokens of 16 bit, at least 1, of a sequence of so many tokens.
  std::uint32_t budget_in_tokens(std::uint32_t length, std::uint32_t head_size) const {
    return budget.resolve(length, head_size, least_token_bytes(head_size));
  }
  Budget budget_at_length(std::uint32_t length, std::uint32_t head_size) const {
    return budget.at_length(length, head_size, least_token_bytes(head_size));
  }
  /// Of a token within the budget. (Where heads differ, their budgets are in tokens of 16 bit.)
  std::uint64_t least_token_bytes(std::uint32_t head_size) const {
    return budget.is_even() ? policy.ladder.least_token_bytes(head_size)
                            : kv_bytes_per_token(head_size);
  }
  /// Whether the KV heads of a layer keep one set, or share their slots: who leaves is found for
  /// all of them.
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
struct Admission {
  std::uint32_t first, tokens;
  bool ends_prompt = false;  ///< the last one of a prompt segment
  bool decodes = false;      ///< of a decode segment
};

/// A configuration for a sequence of known length.
struct ResolvedConfig : CacheConfig {
  std::uint32_t sequence = 0;               ///< which one of a run: random draws are by it too
  std::uint32_t budget_tokens = kNoBudget;  ///< the largest; kNoBudget: nobody leaves
  Guards guards = {};                       ///< of that budget
  HeadBudgets head_budgets = {};            ///< empty: all heads have budget_tokens
  /// As asked for, in tokens of 16 bit, a mean over heads; kNoBudget: nobody leaves.
  std::uint32_t asked_tokens = kNoBudget;
  std::vector<std::uint32_t> layer_numbers = {};  ///< as the model counts; empty: 0, 1, 2, …
  std::map<std::uint32_t, std::vector<RungSlots>> rungs = {};  ///< by budget; empty: one plain rung
  std::vector<Admission> admissions = {};  ///< where they are known beforehand: in a replay
  std::vector<bool> in_dense_prompt = {};  ///< [token], likewise

  BringColumns brings = nullptr;  ///< of find_columns(); null: none that is not computed

  /// By layer: where it is not 0, the model sees that many tokens, and just these are kept,
  /// whatever is asked for. Empty: no such layers.
  std::vector<std::uint32_t> spans = {};

  std::uint32_t span_of(std::uint32_t layer) const { return spans.empty() ? 0 : spans[layer]; }
  /// Whether all tokens of the layer stay, in 16 bit, whatever is asked of the others.
  bool exempts(std::uint32_t layer) const {
    return evicts() && !head_budgets.empty() && head_budgets[layer].front() == kNoBudget;
  }
  Positions positions_of(std::uint32_t layer) const {
    return span_of(layer) > 0 || exempts(layer) ? Positions::original : positions;
  }
  std::uint32_t budget_of(std::uint32_t layer, std::uint32_t kv_head) const {
    if (span_of(layer) > 0) return span_of(layer);
    return evicts() && !head_budgets.empty() ? head_budgets[layer][kv_head] : budget_tokens;
  }
  std::uint32_t threshold16() const { return request_threshold16(threshold); }
  LiveSet::Identity identity(std::uint32_t layer, std::uint32_t kv_head) const {
    return {seed, sequence, layer_numbers.empty() ? layer : layer_numbers[layer], kv_head};
  }
  /// What the prompt's tokens bring a KV head that is not computed. Those after it bring zeros:
  /// they stay.
  void bring(std::uint32_t layer, std::uint32_t kv_head, BroughtColumns& to) const {
    if (brings && span_of(layer) == 0) brings(identity(layer, kv_head).layer, kv_head, to);
  }
  /// What one KV head alone does: budget_tokens and guards are its own; full in an exempt layer.
  ResolvedConfig of_head(std::uint32_t layer, std::uint32_t kv_head) const;
  /// The empty cache of one KV head. Throws std::invalid_argument where the guards do not fit its
  /// budget.
  LiveSet live_set(std::uint32_t layer, std::uint32_t kv_head) const {
    if (const std::uint32_t span = span_of(layer); span > 0)
      return {parse_policy("window"), span, identity(layer, kv_head)};
    if (exempts(layer)) return {parse_policy("full"), kNoBudget, identity(layer, kv_head)};
    LiveSet live{policy, budget_of(layer, kv_head), identity(layer, kv_head)};
    if (shares_slots()) live.share_slots();
    if (const auto own = rungs.find(live.budget()); own != rungs.end()) live.keep_at(own->second);
    return live;
  }
};

/// `config` for a sequence of at most `length` tokens in a model of such heads, which may be left
/// out where the budget is even and not in bytes. Throws std::invalid_argument where the guards do
/// not fit a budget, or budgets by head not the model.
ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence = 0,
                       const CacheShape& model = {});

/// Finds the columns that nobody computes, of the prompt with these ids, where the policy has a
/// source of them. Throws std::invalid_argument as that does, and where decoded tokens may leave.
void find_columns(ResolvedConfig& config, std::span<const std::int32_t> prompt,
                  const CacheShape& model);

}  // namespace kvlab
