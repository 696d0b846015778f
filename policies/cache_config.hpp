// What a cache is to do: as it was asked for, and what that comes to for one sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "policies/live_set.hpp"
#include "policies/observation.hpp"

namespace kvlab {

/// A cache as asked for: on the command line, in policy.json, of a replay, a loop or a decoder.
struct CacheConfig {
  PolicySpec policy = parse_policy("full");
  Budget budget{.extent = {}, .all = true};
  Prefill prefill = {};
  Positions positions = Positions::original;
  std::uint64_t seed = 0;
  double threshold = 0.01;  ///< tau, of requests
  /// Tokens [layer][kv_head], beside a `budget` that is the largest of them; empty: `budget` for
  /// all.
  std::vector<std::vector<std::uint32_t>> head_budgets = {};

  /// Whether tokens ever leave: not under `full`. A reference evicts.
  bool evicts() const { return !policy.entry || policy.entry->info.evicts; }
  /// Whether the KV heads of a layer keep one set.
  bool evicts_by_layer() const { return policy.modifiers.scope == Modifiers::Scope::layer; }
};

/// Tokens that enter a cache together.
struct Admission {
  std::uint32_t first, tokens;
  bool ends_prompt = false;  ///< the last one of a prompt segment
};

/// A configuration for a sequence of known length.
struct ResolvedConfig : CacheConfig {
  std::uint32_t sequence = 0;               ///< which one of a run: random draws are by it too
  std::uint32_t budget_tokens = kNoBudget;  ///< kNoBudget: nobody leaves
  Guards guards = {};                       ///< of that budget
  std::vector<Admission> admissions = {};   ///< where they are known beforehand: in a replay
  std::vector<bool> in_dense_prompt = {};   ///< [token], likewise

  std::uint32_t budget_of(std::uint32_t layer, std::uint32_t kv_head) const {
    return evicts() && !head_budgets.empty() ? head_budgets[layer][kv_head] : budget_tokens;
  }
  std::uint32_t threshold16() const { return request_threshold16(threshold); }
  LiveSet::Identity identity(std::uint32_t layer, std::uint32_t kv_head) const {
    return {seed, sequence, layer, kv_head};
  }
  /// The empty cache of one KV head. Throws std::invalid_argument where the guards do not fit its
  /// budget.
  LiveSet live_set(std::uint32_t layer, std::uint32_t kv_head) const {
    return {policy, budget_of(layer, kv_head), identity(layer, kv_head)};
  }
};

/// `config` for a sequence of at most `length` tokens. Throws std::invalid_argument where the
/// guards do not fit the budget.
ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence = 0);

/// What a decoder refuses. Throws std::invalid_argument: a reference of the replay, budgets by head
/// of another shape.
void check_for_decoder(const CacheConfig& config, std::uint32_t layers, std::uint32_t kv_heads);

/// Throws std::invalid_argument where the policy has modifiers: for those who do not know them yet.
/// `instead`: who does.
void refuse_modifiers(const CacheConfig& config, std::string_view who, std::string_view instead);

}  // namespace kvlab
