#include "policies/cache_config.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "policies/modifiers_text.hpp"

namespace kvlab {

ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence) {
  ResolvedConfig resolved{config};
  resolved.sequence = sequence;
  if (!config.evicts()) return resolved;
  resolved.budget_tokens = config.budget.resolve(length);
  if (config.policy.entry) resolved.guards = resolve_guards(config.policy, resolved.budget_tokens);
  return resolved;
}

void check_for_decoder(const CacheConfig& config, std::uint32_t layers, std::uint32_t kv_heads) {
  if (!config.policy.entry)
    throw std::invalid_argument(fmt::format(
        "policy {} is a reference of the replay; a decoder needs a policy", config.policy.name));
  std::size_t given = 0;
  bool fits = config.head_budgets.empty() || config.head_budgets.size() == layers;
  for (const auto& heads : config.head_budgets) {
    given += heads.size();
    fits = fits && heads.size() == kv_heads;
  }
  if (!fits)
    throw std::invalid_argument(fmt::format("budgets: {} given; {} layers of {} KV heads need {}",
                                            given, layers, kv_heads,
                                            std::size_t{layers} * kv_heads));
}

void refuse_modifiers(const CacheConfig& config, std::string_view who, std::string_view instead) {
  if (!config.evicts() || config.policy.modifiers == Modifiers{}) return;
  throw std::invalid_argument(
      fmt::format("policy {}: {} does not know {}; {} does", config.policy.name, who,
                  fmt::join(modifier_texts(config.policy.modifiers, {}), ", "), instead));
}

}  // namespace kvlab
