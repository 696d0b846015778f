#include "engine/evaluation/policy_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "policies/modifiers/text.hpp"
#include "policies/old_names.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/source/policy_source.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxPolicyBytes = std::size_t{16} << 20;
constexpr std::array<std::string_view, 14> kKeys{
    "format",  "policy",    "params", "protected", "modifiers", "budget", "positions",
    "prefill", "threshold", "seed",   "model",     "run",       "source", "tiers"};

[[noreturn]] void fail(const JsonFields& fields, std::string_view what) {
  throw std::runtime_error(fmt::format("{}: {}", fields.where(), what));
}

void refuse_reserved_and_unknown(const JsonFields& fields, const json& top) {
  if (top.contains("blocks_xxh3") || (top.contains("traces") && top.contains("sweep")))
    fail(fields,
         "is the run.json of a replay, not a policy file; make one: `kvlab deploy RUN --budget B "
         "--out policy.json`");
  const std::vector<std::string> known(kKeys.begin(), kKeys.end());
  if (top.contains("budget") && top["budget"].is_null())
    fail(fields, "budget: null is reserved for a later version; give tokens");
  for (const auto& [key, value] : top.items()) {
    if (std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end()) continue;
    if (key == "scope" || key == "page" || key == "storage")
      fail(fields, fmt::format("key '{}' is reserved for a later version; leave it out", key));
    const auto near = nearest_name(key, known);
    fail(fields, fmt::format("unknown key {}{}", json_quoted(key),
                             near ? "; did you mean '" + *near + "'?" : ""));
  }
}

/// A protection, parameter or modifier as text of the command line: 4, "50%", yes.
std::string setting_text(const JsonFields& fields, const std::string& key) {
  const json& value = fields.any(key);
  if (value.is_number_unsigned()) return fmt::format("{}", value.get<std::uint64_t>());
  if (value.is_number()) return fmt::format("{}", value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  std::string text = value.is_string() ? value.get<std::string>() : ":";
  // A colon would add another setting.
  if (text.find(':') != std::string::npos)
    fail(fields, fmt::format("key '{}' should be a number, or a share such as \"50%\"", key));
  return text;
}

/// The modifiers as text, `:every=64:once=yes`. Modifiers that are not in the file keep the
/// policy's default.
std::string modifiers_from(const JsonFields& modifiers, const JsonFields& file) {
  std::string text;
  for (const auto& [name, value] : file.any("modifiers").items()) {
    if (!is_modifier(name))
      fail(modifiers, fmt::format("unknown modifier {}; known: {}", json_quoted(name),
                                  fmt::join(modifier_names(), ", ")));
    text += fmt::format(":{}={}", name, setting_text(modifiers, name));
  }
  return text;
}

/// Builds the text `name:param=value:sinks=…:recent=…`, so that one parser checks everything.
PolicySpec policy_from(const JsonFields& fields, const CompiledPolicies& compiled) {
  const std::string name(current_name(kOldPolicies, fields.text("policy")));
  const PolicySpec plain = parse_policy(name, {}, compiled);
  if (name.find(':') != std::string::npos || !plain.entry->info.evicts)
    fail(fields, fmt::format("policy '{}' should be the name of a policy that evicts", name));
  const JsonFields params = fields.object("params"), protected_tokens = fields.object("protected");
  std::string text = name;
  std::vector<std::string> settings;
  if (!plain.named_feature().empty()) settings.emplace_back("name");
  for (const ParamInfo& param : plain.entry->params) settings.emplace_back(param.name);
  for (const std::string& setting : settings)
    text += fmt::format(":{}={}", setting, setting_text(params, setting));
  if (fields.any("params").size() != settings.size())
    fail(params, fmt::format("has more than the {} parameters of {}", settings.size(), name));
  if (fields.any("protected").size() != (protected_tokens.has("prompt") ? 3 : 2))
    fail(protected_tokens, "should hold sinks and recent, optionally prompt, and nothing else");
  if (protected_tokens.has("prompt") && protected_tokens.any("prompt") != true)
    fail(protected_tokens, "prompt should be true");
  if (protected_tokens.has("prompt")) text += ":prompt";
  for (const char* protection : {"sinks", "recent"})
    text += fmt::format(":{}={}", protection, setting_text(protected_tokens, protection));
  if (fields.has("tiers")) text += ":" + parse_tier_plan(fields.text("tiers")).setting();
  if (fields.has("modifiers")) text += modifiers_from(fields.object("modifiers"), fields);
  return parse_policy(text, {}, compiled);
}

/// The compiled policy of the file, if the policy is not one of kvlab's.
CompiledPolicies source_of(const JsonFields& fields, const CompiledPolicies& compiled) {
  CompiledPolicies own;
  if (fields.has("source")) {
    const JsonFields source = fields.object("source");
    own = require_source(compiled, fields.text("policy"), source.text("path"), source.text("xxh3"),
                         fields.where());
  }
  own.feature_source = compiled.feature_source;
  return own;
}

/// Reads a budget: tokens; a list of tokens by layer and KV head; bytes ("64KiB"); or a mean that
/// is distributed ("pyramid(128)").
Budget budget_from(const JsonFields& fields, const PolicySpec& policy) {
  const json& budget = fields.any("budget");
  if (budget.is_string()) {
    const Budget shared = parse_budget(budget.get<std::string>());
    if (shared.split == Budget::Split::even && shared.bytes == 0)
      fail(fields,
           "budget should be tokens, a list of them, or such as \"64KiB\", \"pyramid(128)\"");
    return shared;
  }
  const Budget own = budget_from_json(budget, fields.where() + ": budget");
  if (own.is_even()) resolve_protected_tokens(policy, own.extent.tokens);
  for (const auto& layer : own.heads)
    for (const std::uint32_t tokens : layer)
      if (tokens != kNoBudget) resolve_protected_tokens(policy, tokens);
  return own;
}

PolicyFile file_from(const JsonFields& fields, const json& top, const CompiledPolicies& compiled) {
  PolicyFile file;
  CacheConfig& cache = file.cache;
  cache.policy = policy_from(fields, source_of(fields, compiled));
  cache.budget = budget_from(fields, cache.policy);
  cache.positions = parse_positions(fields.text("positions"));
  cache.prefill = parse_prefill(fields.text("prefill"));
  cache.threshold = fields.number("threshold");
  if (cache.threshold < 0 || cache.threshold > 1)
    fail(fields, "threshold should be between 0 and 1");
  if (fields.has("seed")) cache.seed = fields.whole("seed");
  const JsonFields model = fields.object("model");
  model.allow_only({"name", "weights_xxh3"});
  file.model = model.text("name");
  file.weights_xxh3 = model.text("weights_xxh3");
  if (const json* run = json_find(top, "run")) file.run = *run;
  return file;
}

/// The modifiers that the command line would show.
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

/// A protection in policy.json: tokens as a number, a share as text.
json protected_json(Extent extent) {
  if (!extent.is_share) return extent.tokens;
  return fmt::format("{}%", extent.share_ppm / 1e4);
}

}  // namespace

PolicyFile read_policy_file(const std::filesystem::path& path, const CompiledPolicies& compiled) {
  const json top = parse_result_json(read_text_file(path, kMaxPolicyBytes), path.string());
  const JsonFields fields(top, path.string());
  fields.check_format(kPolicyFormat);
  refuse_reserved_and_unknown(fields, top);
  try {
    return file_from(fields, top, compiled);
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
