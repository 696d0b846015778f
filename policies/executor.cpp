#include "policies/executor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/features/features.hpp"

namespace kvlab {
namespace {

std::string refused_features(const Executor& executor, const PolicySpec& policy) {
  const std::string feature = feature_beyond(executor, policy);
  if (feature.empty()) return "";
  if (is_computed(feature, true))
    return fmt::format("policy {}: {} does not support its feature {}; {} does", policy.name,
                       executor.name, feature, executor.instead);
  return fmt::format(
      "policy {}: feature {}: a decoder computes only {}; a replay reads other features from a "
      "trace, and the end-to-end evaluation on the CPU from --features",
      policy.name, feature, computed_feature_names());
}

}  // namespace

std::string cpu_only(std::string_view what, std::string_view why, std::string_view instead) {
  return fmt::format("{}: runs on the CPU only{}{}; use {}", what, why.empty() ? "" : ", because ",
                     why, instead);
}

std::string feature_beyond(const Executor& executor, const PolicySpec& policy) {
  if (executor.features == Features::any) return "";
  if (executor.features == Features::supplied && policy.feature_source) return "";
  for (const std::string& name : policy.features)
    if (executor.features == Features::none ||
        !(executor.features == Features::supplied ? is_computed(name, true)
                                                  : built_in_feature(name).has_value()))
      return name;
  return "";
}

std::string refusal(const Executor& executor, const CacheConfig& config) {
  const PolicySpec& policy = config.policy;
  if (policy.tier_plan.is_kivi() && executor.formats != Formats::all)
    return fmt::format(
        "policy {}: tiers {}: {} does not quantize by channel; a replay and the end-to-end "
        "evaluation on the CPU do",
        policy.name, policy.tier_plan.text(), executor.name);
  if (executor.formats == Formats::kernels)
    for (const KvFormat& format : policy.tier_plan.formats())
      if (!kernel_format(format))
        return cpu_only(fmt::format("policy {}: tiers {}", policy.name, policy.tier_plan.text()),
                        fmt::format("CUDA devices do not support format {}", format.name()),
                        executor.instead);
  if (!executor.formats_by_layer && policy.tier_plan.is_by_layer())
    return fmt::format("policy {}: tiers {}: {} does not support formats by layer; {} does",
                       policy.name, policy.tier_plan.text(), executor.name, executor.instead);
  if (const std::size_t tiers = policy.tier_plan.tiers.size(); tiers > executor.max_tiers)
    return fmt::format(
        "policy {}: tiers {}: the plan has {} tiers, but {} supports at most {}; {} supports {}",
        policy.name, policy.tier_plan.text(), tiers, executor.name, executor.max_tiers,
        executor.instead, kMaxTiers);
  if (policy.centre != KeyCentre::none && !executor.centred_keys)
    return fmt::format("policy {}: centre: {} does not centre keys; {} does", policy.name,
                       executor.name, executor.instead);
  if (!policy.entry)
    return fmt::format("policy {} is an oracle, which only the replay supports; {} needs a policy",
                       policy.name, executor.name);
  if (!config.evicts()) return "";
  // A prompt's last token may be fed by a step. That step demotes a token to the row of the victim,
  // which is chosen before ranks are smoothed. After smoothing, another token may be the victim.
  if (const Modifiers& own = policy.modifiers; !executor.smooth_on_tiers && own.smooth > 0 &&
                                               own.steps_evict() &&
                                               policy.tier_plan.tiers.size() > 1)
    return fmt::format(
        "policy {}: smooth={}: {} does not support it on several tiers without every above 1, once "
        "or scope=layer; {} does",
        policy.name, own.smooth, executor.name, executor.instead);
  if (policy.entry->see_rows && config.prefill.chunk != 0)
    return fmt::format("policy {}: needs the whole prompt at once; use --prefill dense",
                       policy.name);
  const std::string budget_prefix = fmt::format("budget {}", config.budget.text());
  if (config.shares_slots() && !executor.shared_slots)
    return fmt::format("{}: {} does not support it; {} does", budget_prefix, executor.name,
                       executor.instead);
  if (config.budget.exempts() && !executor.exempt_layers)
    return cpu_only(budget_prefix, "it exempts layers", executor.instead);
  const std::string policy_prefix = fmt::format("policy {}", policy.name);
  if (policy.entry->has_order_hooks() && !executor.order_hooks)
    return cpu_only(policy_prefix, "its hooks know the eviction order", executor.instead);
  if (policy.entry->factored && !executor.products)
    return cpu_only(policy_prefix, "it is a product with a feature", executor.instead);
  return refused_features(executor, policy);
}

bool side_by_side(const CacheConfig& one, const CacheConfig& other) {
  return one.policy.entry == other.policy.entry && one.policy.features == other.policy.features &&
         one.positions == other.positions;
}

std::vector<std::vector<std::size_t>> batches_of(
    std::span<const CacheConfig> configs, std::size_t max_size,
    const std::function<bool(const CacheConfig&, const CacheConfig&)>& alike) {
  std::vector<std::vector<std::size_t>> batches;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    const auto batch = std::ranges::find_if(batches, [&](const auto& b) {
      return b.size() < max_size && alike(configs[b.front()], configs[c]);
    });
    if (batch == batches.end())
      batches.push_back({c});
    else
      batch->push_back(c);
  }
  return batches;
}

void check_held(const Executor& executor, const CacheConfig& config) {
  if (const std::string why = refusal(executor, config); !why.empty())
    throw std::invalid_argument(why);
}

void check_held(const Executor& executor, const ResolvedConfig& config, const CacheShape& model) {
  check_held(executor, config);
  std::size_t given = 0;
  bool fits = config.head_budgets.empty() || config.head_budgets.size() == model.layers;
  for (const auto& heads : config.head_budgets) {
    given += heads.size();
    fits = fits && heads.size() == model.kv_heads;
  }
  if (!fits)
    throw std::invalid_argument(fmt::format("budgets: {} given; {} layers of {} KV heads need {}",
                                            given, model.layers, model.kv_heads,
                                            std::size_t{model.layers} * model.kv_heads));
}

}  // namespace kvlab
