// The C library links this file too.
#include "engine/evaluation/policy_json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "policies/modifiers/text.hpp"
#include "policies/old_names.hpp"
#include "sim/budgets/budget_file.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 15> kKeys{
    "format",    "policy", "params", "protected", "modifiers", "budget", "positions", "prefill",
    "threshold", "seed",   "model",  "run",       "source",    "tiers",  "centre"};

[[noreturn]] void fail(const JsonFields& fields, std::string_view what) {
  throw std::runtime_error(fmt::format("{}: {}", fields.where(), what));
}

void refuse_reserved_and_unknown(const JsonFields& fields) {
  const json& top = fields.json();
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

/// The value of `sinks`, `recent` or a modifier as command-line text: 4, "50%", yes.
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

void read_params(const JsonFields& params, PolicyJson& file) {
  for (const auto& [key, value] : params.json().items()) {
    if (key == "name")
      file.feature = params.text(key);
    else if (value.is_number())
      file.params.emplace_back(key, value.get<double>());
    else
      params.refuse(key, "a number is expected");
  }
}

void read_protected(const JsonFields& tokens, PolicyJson& file) {
  const auto extent = [&](const char* key) {
    return parse_extent(setting_text(tokens, key), fmt::format("protected: {}", key), 0);
  };
  file.sinks = extent("sinks");
  file.recent = extent("recent");
  file.prompt = tokens.has("prompt");
  if (tokens.json().size() != (file.prompt ? 3 : 2))
    fail(tokens, "should have sinks and recent, may have prompt, and should have nothing else");
  if (file.prompt && tokens.any("prompt") != true) fail(tokens, "prompt should be true");
}

void read_modifiers(const JsonFields& modifiers, PolicyJson& file) {
  for (const auto& [name, value] : modifiers.json().items()) {
    if (!is_modifier(name))
      fail(modifiers, fmt::format("unknown modifier {}; known: {}", json_quoted(name),
                                  fmt::join(modifier_names(), ", ")));
    file.modifiers.emplace_back(name, setting_text(modifiers, name));
  }
}

Budget budget_from(const JsonFields& top) {
  const json& budget = top.any("budget");
  if (!budget.is_string()) return budget_from_json(budget, top.where() + ": budget");
  const Budget split = parse_budget(budget.get<std::string>());
  if (split.split == Budget::Split::even && split.bytes == 0)
    fail(top,
         "budget should be tokens, a list of them, or text such as \"64KiB\" or \"pyramid(128)\"");
  return split;
}

Prefill prefill_from(const JsonFields& top) {
  try {
    return parse_prefill(top.text("prefill"));
  } catch (const std::invalid_argument&) {
    top.refuse("prefill", "dense, stream or chunk:N, with N from 1, is expected");
  }
}

PolicyJson file_from(const JsonFields& top) {
  PolicyJson file;
  file.path = top.where();
  file.policy = current_name(kOldPolicies, top.text("policy"));
  read_params(top.object("params"), file);
  read_protected(top.object("protected"), file);
  if (top.has("modifiers")) read_modifiers(top.object("modifiers"), file);
  if (top.has("tiers")) file.tiers = top.text("tiers");
  if (top.has("centre")) file.centre = top.text("centre");
  file.budget = budget_from(top);
  file.positions = parse_positions(top.text("positions"));
  file.prefill = prefill_from(top);
  file.threshold = top.number("threshold");
  if (file.threshold < 0 || file.threshold > 1) fail(top, "threshold should be between 0 and 1");
  if (top.has("seed")) file.seed = top.whole("seed");
  if (top.has("source")) {
    const JsonFields source = top.object("source");
    file.source = {source.text("path"), source.text("xxh3")};
  }
  const JsonFields model = top.object("model");
  model.allow_only({"name", "weights_xxh3"});
  file.model = model.text("name");
  file.weights_xxh3 = model.text("weights_xxh3");
  if (top.has("run")) file.run = top.any("run");
  return file;
}

}  // namespace

std::vector<double> PolicyJson::params_of(std::span<const std::string_view> names,
                                          bool takes_feature) const {
  std::vector<double> values;
  for (const std::string_view name : names) {
    const auto found = std::ranges::find(
        params, name, [](const auto& one) -> const std::string& { return one.first; });
    if (found != params.end()) values.push_back(found->second);
  }
  std::vector<std::string_view> expected(names.begin(), names.end());
  if (takes_feature) expected.emplace_back("name");
  if (values.size() != names.size() || params.size() != names.size() ||
      takes_feature == feature.empty())
    fail(fmt::format("params: should have exactly the {} parameters of {}{}{}", expected.size(),
                     policy, expected.empty() ? "" : ": ", fmt::join(expected, ", ")));
  return values;
}

void PolicyJson::fail(std::string_view what) const {
  throw std::runtime_error(fmt::format("{}: {}", path, what));
}

PolicyJson parse_policy_json(std::string_view text, const std::string& path) {
  const json top = parse_result_json(text, path);
  const JsonFields fields(top, path);
  fields.check_format(kPolicyFormat);
  refuse_reserved_and_unknown(fields);
  try {
    return file_from(fields);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", path, error.what()));
  }
}

}  // namespace kvlab
