#include "policies/cache_config.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "policies/modifiers_text.hpp"

namespace kvlab {

namespace {

/// One set for all KV heads of a layer has one size.
void check_layer_budgets(const CacheConfig& config) {
  if (!config.evicts_by_layer()) return;
  for (std::size_t layer = 0; layer < config.head_budgets.size(); ++layer)
    for (const std::uint32_t budget : config.head_budgets[layer])
      if (budget != config.head_budgets[layer].front())
        throw std::invalid_argument(
            fmt::format("policy {}: under scope=layer the KV heads of a layer keep one set, and in "
                        "layer {} budgets of {} and {} tokens are asked for; one would be right",
                        config.policy.name, layer, config.head_budgets[layer].front(), budget));
}

}  // namespace

ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence) {
  ResolvedConfig resolved{config};
  resolved.sequence = sequence;
  check_layer_budgets(config);
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
