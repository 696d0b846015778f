#include "engine/evaluation/policy_file.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "engine/evaluation/policy_json.hpp"
#include "policies/modifiers/text.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/plan/centre_file.hpp"
#include "sim/source/policy_source.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

/// Builds the text `name:param=value:…`, so that one parser checks everything.
PolicySpec policy_from(const PolicyJson& file, const CompiledPolicies& compiled) {
  const PolicySpec plain = parse_policy(file.policy, {}, compiled);
  if (file.policy.find(':') != std::string::npos || !plain.entry->info.evicts)
    file.fail(fmt::format("policy '{}' should be the name of a policy that evicts", file.policy));
  std::vector<std::string_view> names;
  for (const ParamInfo& param : plain.entry->params) names.emplace_back(param.name);
  const std::vector<double> params = file.params_of(names, !plain.named_feature().empty());
  std::string text = file.policy;
  for (std::size_t i = 0; i < names.size(); ++i) text += fmt::format(":{}={}", names[i], params[i]);
  if (file.prompt) text += ":prompt";
  if (!file.tiers.empty()) text += ":" + parse_tier_plan(file.tiers).setting();
  if (!file.centre.empty())
    text += ":centre=" +
            parse_key_centre_in(std::filesystem::path(file.path).parent_path(), file.centre).text();
  for (const auto& [name, value] : file.modifiers) text += fmt::format(":{}={}", name, value);
  PolicySpec policy = parse_policy(text, {}, compiled);
  if (!file.feature.empty()) policy.name_feature(file.feature);
  policy.sinks = file.sinks;
  policy.recent = file.recent;
  load_centre(policy.centre);
  return policy;
}

/// The compiled policy of the file; empty if the policy is one of kvlab's.
CompiledPolicies source_of(const PolicyJson& file, const CompiledPolicies& compiled) {
  CompiledPolicies own;
  if (file.source)
    own = require_source(compiled, file.policy, file.source->path, file.source->xxh3, file.path);
  own.feature_source = compiled.feature_source;
  return own;
}

/// Throws std::invalid_argument if the protected tokens do not fit a budget in tokens.
void check_protected(const PolicySpec& policy, const Budget& budget) {
  if (budget.is_even() && !budget.in_bytes) resolve_protected_tokens(policy, budget.extent.tokens);
  for (const auto& layer : budget.heads)
    for (const std::uint32_t tokens : layer)
      if (tokens != kNoBudget) resolve_protected_tokens(policy, tokens);
}

PolicyFile file_from(PolicyJson file, const CompiledPolicies& compiled) {
  PolicySpec policy = policy_from(file, source_of(file, compiled));
  check_protected(policy, file.budget);
  return {.cache = {.policy = std::move(policy),
                    .budget = std::move(file.budget),
                    .prefill = file.prefill,
                    .positions = file.positions,
                    .seed = file.seed,
                    .threshold = file.threshold},
          .model = std::move(file.model),
          .weights_xxh3 = std::move(file.weights_xxh3),
          .run = std::move(file.run)};
}

/// The modifiers that the policy's text on the command line would contain.
nlohmann::ordered_json modifiers_json(const PolicySpec& policy) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [name, value] :
       modifier_settings(policy.modifiers, policy.entry->info.modifiers)) {
    if (name == "every" || name == "smooth")
      object[std::string(name)] = std::stoul(value);
    else if (name == "once")
      object[std::string(name)] = value == "yes";
    else
      object[std::string(name)] = value;
  }
  return object;
}

/// The value of `sinks` or `recent` in policy.json: a number for tokens, a text for a share.
json protected_json(Extent extent) {
  if (!extent.is_share) return extent.tokens;
  return fmt::format("{}%", extent.share_ppm / 1e4);
}

}  // namespace

PolicyFile read_policy_file(const std::filesystem::path& path, const CompiledPolicies& compiled) {
  PolicyJson file = parse_policy_json(read_text_file(path, kMaxPolicyBytes), path.string());
  try {
    return file_from(std::move(file), compiled);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", path.string(), error.what()));
  }
}

void write_policy_file(const std::filesystem::path& path, const PolicyFile& file) {
  const CacheConfig& cache = file.cache;
  json params = json::object();
  if (const std::string feature = cache.policy.named_feature(); !feature.empty())
    params["name"] = feature;
  for (std::size_t i = 0; i < cache.policy.params.size(); ++i)
    params[std::string(cache.policy.entry->params[i].name)] = cache.policy.params[i];
  json budget = cache.budget.extent.tokens;
  if (!cache.budget.heads.empty())
    budget = budgets_json(cache.budget.heads);
  else if (!cache.budget.is_even() || cache.budget.in_bytes)
    budget = cache.budget.text();
  nlohmann::ordered_json top{{"format", kPolicyFormat},
                             {"policy", cache.policy.name},
                             {"params", params},
                             {"protected",
                              {{"sinks", protected_json(cache.policy.sinks)},
                               {"recent", protected_json(cache.policy.recent)}}},
                             {"budget", budget},
                             {"positions", name_of(cache.positions)},
                             {"prefill", cache.prefill.text()},
                             {"threshold", cache.threshold},
                             {"seed", cache.seed},
                             {"model", {{"name", file.model}, {"weights_xxh3", file.weights_xxh3}}},
                             {"run", file.run}};
  if (cache.policy.prompt) top["protected"]["prompt"] = true;
  if (const auto modifiers = modifiers_json(cache.policy); !modifiers.empty())
    top["modifiers"] = modifiers;
  if (!cache.policy.tier_plan.is_plain()) top["tiers"] = cache.policy.tier_plan.text();
  if (cache.policy.centre != KeyCentre::none)
    top["centre"] = cache.policy.centre.text_in(path.parent_path());
  if (const auto& source = cache.policy.entry->source)
    top["source"] = {{"path", source->path}, {"xxh3", source->xxh3}};
  write_file_atomically(path, json_text(top) + "\n");
}

void check_shape(const PolicyFile& file, const CacheShape& model) {
  const HeadBudgets& budgets = file.cache.budget.heads;
  if (!budgets.empty()) check_shape(budgets, model.policy_layers(), "policy file");
}

std::string model_mismatch(const PolicyFile& file, const std::string& model,
                           const std::string& weights_xxh3) {
  if (file.weights_xxh3.empty() || weights_xxh3.empty() || file.weights_xxh3 == weights_xxh3)
    return "";
  return fmt::format("the policy was chosen on {} (weights {}), not on {} (weights {})", file.model,
                     file.weights_xxh3, model, weights_xxh3);
}

}  // namespace kvlab
