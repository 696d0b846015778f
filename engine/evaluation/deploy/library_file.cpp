// Reads policy.json for users of kvlab.h, as integers that the library's calls take. It is compiled
// into the library, which contains the registered policies but not the catalogue of policies.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "engine/evaluation/policy_json.hpp"
#include "kernels/kvlab.h"
#include "kernels/why_not.hpp"
#include "policies/modifiers/text.hpp"
#include "policies/observation.hpp"
#include "policies/registry.hpp"

namespace kvlab {
namespace {

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) throw std::runtime_error(path + ": cannot be read");
  // Limits the read, because the path may be a device whose data never ends.
  std::string text(kMaxPolicyBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxPolicyBytes)
    throw std::runtime_error(path + ": is larger than 16 MiB, so it is not a policy.json");
  return text;
}

/// What the registry says about the policy `name`, which is a policy of the library.
template <class... Policies>
PolicyInfo info_of(PolicyList<Policies...>, std::string_view name) {
  PolicyInfo found{};
  ((name == Policies::kInfo.name ? void(found = Policies::kInfo) : void()), ...);
  return found;
}

/// Whether the parameter `name` selects one of the policy's features.
bool takes_feature(const PolicyInfo& info) {
  return std::any_of(info.features, info.features + info.feature_count(),
                     [](std::string_view feature) { return feature.starts_with("name="); });
}

void convert_policy(const PolicyJson& json, kvlab_policy_file& file) {
  if (json.source)
    json.fail(
        "source: only policies of the library are supported here; for other policies use "
        "kvlab_compile_policy");
  if (!json.tiers.empty())
    json.fail(
        "key \"tiers\" is not known to kvlab_read_policy_file; give the tiers in "
        "kvlab_kv_cache_config");
  if (!json.centre.empty())
    json.fail("key \"centre\": the kernel library does not centre keys; leave it out");
  file.policy = kvlab_find_policy(json.policy.c_str());
  const PolicyInfo info = info_of(Registry{}, json.policy);
  if (file.policy == nullptr || !info.evicts)
    json.fail(
        fmt::format("policy '{}' should be a policy of the library that evicts", json.policy));
  std::vector<std::string_view> names;
  while (const char* name = kvlab_policy_parameter(file.policy, static_cast<int>(names.size())))
    names.emplace_back(name);
  if (names.size() > KVLAB_MAX_PARAMS || json.feature.size() >= sizeof file.feature)
    json.fail(fmt::format(
        "policy '{}' has {} parameters and a feature name of {} letters; at most {} "
        "parameters and {} letters are supported",
        json.policy, names.size(), json.feature.size(), KVLAB_MAX_PARAMS, sizeof file.feature - 1));
  const std::vector<double> params = json.params_of(names, takes_feature(info));
  file.param_count = static_cast<int>(params.size());
  std::ranges::copy(params, file.params);
  json.feature.copy(file.feature, sizeof file.feature - 1);
  std::vector<std::byte> unused(kvlab_policy_params_bytes(file.policy));
  if (kvlab_policy_params(file.policy, file.params, file.param_count, unused.data()))
    json.fail("params: each number should be in its range, as `kvlab policies` lists it");
}

Modifiers modifiers_of(const PolicyJson& json) {
  const PolicyInfo info = info_of(Registry{}, json.policy);
  Modifiers modifiers = info.modifiers;
  for (const auto& [name, value] : json.modifiers)
    set_modifier(modifiers, name, value, "modifiers: " + name);
  check_modifiers(modifiers, info);
  return modifiers;
}

HeadBudgets budgets_of(const PolicyJson& json, const kvlab_policy_file& file) {
  const Budget& budget = json.budget;
  const CacheShape model{static_cast<std::uint32_t>(file.layers),
                         static_cast<std::uint32_t>(file.kv_heads)};
  const bool in_tokens = !budget.in_bytes && !budget.extent.is_share && !budget.is_prompt_share;
  if (!in_tokens || budget.split == Budget::Split::ada)
    json.fail("budget: should be tokens, a list of tokens, or pyramid(TOKENS)");
  if (!budget.heads.empty()) {
    check_shape(budget.heads, model, "budget");
    return budget.heads;
  }
  const std::uint32_t mean = budget.extent.tokens;
  if (budget.split == Budget::Split::even) return HeadBudgets(model.layers, {mean});
  HeadBudgets layers;
  for (const std::uint32_t tokens :
       pyramid_budgets(mean, file.tokens, min_budget({.sinks = json.sinks, .recent = json.recent}),
                       model.layers))
    layers.push_back({tokens});
  return layers;
}

kvlab_rule rule_of(const PolicyJson& json, std::uint32_t budget, bool group_max) {
  if (budget == kNoBudget) return {budget, 0, 0, group_max};
  const kvlab_rule rule{budget, json.sinks.resolve(budget), json.recent.resolve(budget), group_max};
  if (rule.sinks >= budget || rule.recent > budget - rule.sinks)
    json.fail(fmt::format("budget: should be at least {} tokens, so that the protected tokens fit",
                          min_budget({.sinks = json.sinks, .recent = json.recent})));
  return rule;
}

void convert_rules(const PolicyJson& json, kvlab_policy_file& file, bool group_max) {
  if (json.prompt)
    json.fail("protected: kvlab_read_policy_file does not support prompt; leave it out");
  kvlab_rule* rule = file.rules;
  for (const auto& layer : budgets_of(json, file))
    for (int head = 0; head < file.kv_heads; ++head)
      *rule++ = rule_of(json, layer.size() == 1 ? layer[0] : layer[head], group_max);
}

void convert(const PolicyJson& json, kvlab_policy_file& file) {
  convert_policy(json, file);
  const Modifiers modifiers = modifiers_of(json);
  file.every = modifiers.every;
  file.once = modifiers.once ? 1 : 0;
  file.smooth = modifiers.smooth;
  file.pool_max = modifiers.pool == Modifiers::Pool::max ? 1 : 0;
  file.by_layer = modifiers.scope == Modifiers::Scope::layer ? 1 : 0;
  convert_rules(json, file, modifiers.group == Modifiers::Group::max);
  file.numbering =
      json.positions == Positions::cache ? KVLAB_CACHE_POSITIONS : KVLAB_ORIGINAL_POSITIONS;
  file.prefill_chunk = json.prefill.chunk;
  file.threshold16 = request_threshold16(json.threshold);
  file.seed = json.seed;
}

}  // namespace
}  // namespace kvlab

extern "C" cudaError_t kvlab_read_policy_file(const char* path, kvlab_policy_file* file) {
  using namespace kvlab;
  const auto refused = [](const std::string& why) {
    return kernels::record_error("kvlab_read_policy_file", cudaErrorInvalidValue, why);
  };
  if (path == nullptr || file == nullptr) return refused("an argument is NULL");
  if (const std::string why = kernels::why_not_size(*file); !why.empty()) return refused(why);
  if (file->layers < 1 || file->kv_heads < 1 || file->tokens < 1 || file->rules == nullptr)
    return refused("layers, kv_heads, tokens or rules is 0; give the numbers of the model");
  try {
    kvlab_policy_file found{.struct_size = sizeof found,
                            .layers = file->layers,
                            .kv_heads = file->kv_heads,
                            .tokens = file->tokens,
                            .rules = file->rules};
    const PolicyJson json = parse_policy_json(text_of_file(path), path);
    try {
      convert(json, found);
    } catch (const std::invalid_argument& error) {
      json.fail(error.what());
    }
    *file = found;
    return kernels::record_error("kvlab_read_policy_file", cudaSuccess);
  } catch (const std::exception& error) {
    return refused(error.what());
  }
}
