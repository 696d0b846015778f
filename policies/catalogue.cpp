#include "policies/catalogue.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <stdexcept>
#include <utility>

#include "policies/features/features.hpp"
#include "policies/mass/presets.hpp"
#include "policies/modifiers/text.hpp"
#include "policies/old_names.hpp"
#include "policies/parse_number.hpp"

namespace kvlab {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t start = 0;;) {
    const std::size_t end = text.find(separator, start);
    parts.push_back(text.substr(start, end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

bool is_reserved(std::string_view word) { return word == "page" || word == "storage"; }

/// A hint for a name that papers or other libraries use for a policy or a split of budgets. Empty
/// if the name is unknown.
std::string hint_of_paper(std::string_view word) {
  std::string name;
  for (const char c : word)
    if (std::isalnum(static_cast<unsigned char>(c)))
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  constexpr std::pair<std::string_view, std::string_view> kHints[] = {
      {"streamingllm", "StreamingLLM is the policy 'sink'"},
      {"attentionsinks", "attention sinks are the policy 'sink'"},
      {"slidingwindow", "a sliding window is the policy 'window'"},
      {"heavyhitter", "heavy hitters are the policy 'h2o'"},
      {"pyramidkv",
       "PyramidKV is a way of sharing a budget: --policy snapkv --budget "
       "'pyramid(20%)'"},
      {"pyramid",
       "a pyramid is a way of sharing a budget: --policy snapkv --budget "
       "'pyramid(20%)'"},
      {"adakv", "Ada-KV is a way of sharing a budget: --policy snapkv --budget 'ada(20%)'"},
      {"ada", "Ada-KV is a way of sharing a budget: --policy snapkv --budget 'ada(20%)'"},
      {"none", "the full cache is 'full'"}};
  for (const auto& [known, hint] : kHints)
    if (name == known) return fmt::format("; {}", hint);
  return "";
}

std::string hint(std::string_view word, std::span<const std::string> candidates) {
  if (const auto near = nearest_name(word, candidates))
    return fmt::format("; did you mean '{}'?", *near);
  return fmt::format("; known: {}", fmt::join(candidates, ", "));
}

/// Index of the policy's feature that the setting `name=` selects, if any.
constexpr std::string_view kNamed = "name=";
std::optional<std::size_t> named_index(const PolicyInfo& info) {
  for (std::size_t i = 0; i < info.feature_count(); ++i)
    if (std::string_view(info.features[i]).starts_with(kNamed)) return i;
  return std::nullopt;
}

std::vector<std::string> standard_features(const PolicyInfo& info) {
  std::vector<std::string> names(info.features, info.features + info.feature_count());
  if (const auto place = named_index(info)) names[*place].erase(0, kNamed.size());
  return names;
}

void apply_setting(PolicySpec& spec, std::string_view setting) {
  const std::size_t equals = setting.find('=');
  const std::string_view key = setting.substr(0, equals);
  const std::string what = fmt::format("policy {}: {}", spec.name, key);
  if (is_reserved(key))
    throw std::invalid_argument(what + " is reserved for a later version; leave it out");
  if (setting == "once") return void(spec.modifiers.once = true);
  if (setting == "prompt") return void(spec.prompt = true);
  if (equals == std::string_view::npos)
    throw std::invalid_argument(
        fmt::format("policy {}: '{}' should read parameter=value", spec.name, setting));
  const std::string_view value = setting.substr(equals + 1);
  if (key == "sinks") return void(spec.sinks = parse_extent(value, what, 0));
  if (key == "recent") return void(spec.recent = parse_extent(value, what, 0));
  if (key == "tiers") return void(spec.tier_plan = parse_tier_plan(value));
  if (key == "centre") return void(spec.centre = parse_key_centre(value));
  if (key == "name" && named_index(spec.entry->info)) return spec.name_feature(value);
  if (is_modifier(key)) return set_modifier(spec.modifiers, key, value, what);

  std::vector<std::string> known;
  if (named_index(spec.entry->info)) known.emplace_back("name");
  for (std::size_t i = 0; i < spec.entry->params.size(); ++i) {
    const ParamInfo& param = spec.entry->params[i];
    known.emplace_back(param.name);
    if (key != param.name) continue;
    const double number = parse_number(
        value, what, fmt::format("a number from {:g} to {:g}", param.min_value, param.max_value));
    if (!in_range(number, param.min_value, param.max_value))
      throw std::invalid_argument(fmt::format("{}={} is outside {:g} to {:g}", what, value,
                                              param.min_value, param.max_value));
    spec.params[i] = number;
    return;
  }
  known.insert(known.end(), {"sinks", "recent", "prompt"});
  known.insert(known.end(), modifier_names().begin(), modifier_names().end());
  known.emplace_back("tiers");
  known.emplace_back("centre");
  throw std::invalid_argument(
      fmt::format("policy {}: unknown parameter '{}'{}", spec.name, key, hint(key, known)));
}

/// Replaces `preset=NAME` in `h2o:preset=NAME:more` by the preset's settings; settings in `more`
/// override those of the preset. Returns the text of a policy without presets unchanged.
std::string without_preset(std::string_view text) {
  const auto parts = split(text, ':');
  const auto named = std::ranges::find_if(
      parts, [](std::string_view part) { return part.starts_with("preset="); });
  const auto presets = presets_of(parts[0]);
  if (presets.empty() || named == parts.end()) return std::string(text);

  const std::string_view name = named->substr(std::string_view("preset=").size());
  const auto preset = std::ranges::find(presets, name, &Preset::name);
  if (preset == presets.end()) {
    std::vector<std::string> known;
    for (const Preset& one : presets) known.emplace_back(one.name);
    throw std::invalid_argument(
        fmt::format("policy {}: unknown preset '{}'{}", parts[0], name, hint(name, known)));
  }
  if (preset->policy.empty())
    throw std::invalid_argument(
        fmt::format("policy h2o: kvlab's eviction rule cannot express preset {} ({}): {}", name,
                    preset->code, preset->deviates));
  const auto key = [](std::string_view part) { return part.substr(0, part.find('=')); };
  const auto own = split(preset->policy, ':');
  std::vector<std::string_view> kept{own[0]};
  for (const std::string_view part : std::span(own).subspan(1))
    if (std::ranges::find(parts, key(part), key) == parts.end()) kept.push_back(part);
  for (const std::string_view part : std::span(parts).subspan(1))
    if (part != *named) kept.push_back(part);
  return fmt::format("{}", fmt::join(kept, ":"));
}

}  // namespace

const std::vector<PolicyEntry>& policy_catalogue() {
  static const std::vector<PolicyEntry> catalogue = [] {
    std::vector<PolicyEntry> entries;
    for (const PolicyOps& ops : registry_ops()) entries.push_back({ops});
    return entries;
  }();
  return catalogue;
}

std::vector<std::byte> PolicySpec::packed_params() const {
  if (entry->host) {
    const auto host = std::bit_cast<std::array<std::byte, sizeof(void*)>>(entry->host.get());
    return {host.begin(), host.end()};
  }
  std::vector<std::byte> packed(entry->params_bytes);
  entry->write_params(params, packed.data());
  return entry->factored ? product_params(*entry, packed) : packed;
}

std::string PolicySpec::named_feature() const {
  const auto place = entry ? named_index(entry->info) : std::nullopt;
  return place ? features[*place] : "";
}

void PolicySpec::name_feature(std::string_view feature) {
  const auto place = entry ? named_index(entry->info) : std::nullopt;
  if (!place)
    throw std::invalid_argument(
        fmt::format("policy {}: does not read a named feature; leave the name out", name));
  if (!is_feature_name(feature))
    throw std::invalid_argument(
        fmt::format("policy {}: name: '{}' should be a feature's name: up to 64 letters, digits, "
                    "'_', '-' and '.'",
                    name, feature));
  features[*place] = feature;
}

std::string PolicySpec::params_text() const {
  if (!entry) return "";
  std::string own_tiers = tier_plan.is_plain() ? "" : tier_plan.setting();
  if (centre != KeyCentre::none) own_tiers += ":centre=" + centre.text();
  if (!entry->info.evicts) return own_tiers;
  std::vector<std::string> parts;
  if (const std::string feature = named_feature(); !feature.empty())
    parts.push_back(fmt::format("{}{}", kNamed, feature));
  for (std::size_t i = 0; i < params.size(); ++i)
    parts.push_back(fmt::format("{}={}", entry->params[i].name, params[i]));
  parts.push_back("sinks=" + text_of(sinks));
  parts.push_back("recent=" + text_of(recent));
  if (prompt) parts.emplace_back("prompt");
  for (std::string& text : modifier_texts(modifiers, entry->info.modifiers))
    parts.push_back(std::move(text));
  if (!own_tiers.empty()) parts.push_back(own_tiers);
  return fmt::format("{}", fmt::join(parts, ":"));
}

std::string PolicySpec::text() const {
  const std::string settings = params_text();
  return settings.empty() ? name : name + ":" + settings;
}

std::string PolicySpec::brief() const {
  if (!entry) return text();
  PolicySpec plain = *this;
  for (std::size_t i = 0; i < params.size(); ++i) plain.params[i] = entry->params[i].standard;
  plain.features.assign(features.size(), "");
  plain.sinks = entry->info.sinks;
  plain.recent = entry->info.recent;
  plain.prompt = false;
  plain.modifiers = entry->info.modifiers;
  plain.tier_plan = {};
  plain.centre = {};
  const std::string own = params_text(), standard = plain.params_text();
  const auto defaults = split(standard, ':');
  std::string text = name;
  for (const std::string_view setting : split(own, ':'))
    if (!setting.empty() && std::ranges::find(defaults, setting) == defaults.end())
      text += fmt::format(":{}", setting);
  return text;
}

std::string brief_policy(const std::string& text) {
  try {
    return parse_policy(text).brief();
  } catch (const std::invalid_argument&) {
    return text;
  }
}

PolicySpec parse_policy(std::string_view text, std::span<const std::string_view> oracles,
                        const CompiledPolicies& compiled) {
  const std::string requested = without_preset(current_policy(text));
  const auto parts = split(requested, ':');
  PolicySpec spec;
  spec.name = parts[0];
  const std::string ranked = spec.name.substr(0, spec.name.find('*'));
  std::vector<std::string> known;
  for (const PolicyEntry& entry : policy_catalogue()) {
    known.emplace_back(entry.info.name);
    // A non-owning pointer: the catalogue lives as long as the process.
    if (ranked == entry.info.name)
      spec.entry = std::shared_ptr<const PolicyEntry>(std::shared_ptr<void>(), &entry);
  }
  for (const auto& entry : compiled.entries) known.emplace_back(entry->info.name);
  if (auto own = compiled.find(ranked)) spec.entry = std::move(own);
  if (spec.entry && ranked.size() < spec.name.size())
    spec.entry = product_of(spec.entry, spec.name, spec.name.substr(ranked.size() + 1));
  known.insert(known.end(), oracles.begin(), oracles.end());
  if (!spec.entry) {
    if (std::find(oracles.begin(), oracles.end(), spec.name) == oracles.end()) {
      const std::string paper = hint_of_paper(spec.name);
      throw std::invalid_argument(fmt::format("unknown policy '{}'{}", spec.name,
                                              paper.empty() ? hint(spec.name, known) : paper));
    }
    if (parts.size() > 1)
      throw std::invalid_argument(fmt::format(
          "policy {} is an oracle: it has no parameters and no protected tokens", spec.name));
    return spec;
  }
  for (const ParamInfo& param : spec.entry->params) spec.params.push_back(param.standard);
  spec.features = standard_features(spec.entry->info);
  spec.feature_source = compiled.feature_source;
  spec.sinks = spec.entry->info.sinks;
  spec.recent = spec.entry->info.recent;
  spec.modifiers = spec.entry->info.modifiers;
  const auto is_tiers_setting = [](std::string_view part) {
    return part.starts_with("tiers=") || part.starts_with("centre=");
  };
  if (!spec.entry->info.evicts && !std::all_of(parts.begin() + 1, parts.end(), is_tiers_setting))
    throw std::invalid_argument(fmt::format(
        "policy {} never evicts: it has no parameters and no protected tokens", spec.name));
  std::vector<std::string_view> given;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    apply_setting(spec, parts[i]);
    given.push_back(parts[i].substr(0, parts[i].find('=')));
    if (std::count(given.begin(), given.end(), given.back()) > 1)
      throw std::invalid_argument(
          fmt::format("policy {}: {} is given twice; give it once", spec.name, given.back()));
  }
  if (spec.centre != KeyCentre::none && spec.tier_plan.is_plain())
    throw std::invalid_argument(
        fmt::format("policy {}: centre: keys are centred only in a tier plan; add tiers=4, or "
                    "leave centre out",
                    spec.name));
  const bool requests_pool = std::ranges::find(given, "pool") != given.end();
  if (spec.modifiers.smooth == 0 && !requests_pool) spec.modifiers.pool = Modifiers::Pool::mean;
  check_modifiers(spec.modifiers, spec.entry->info);
  if (spec.prompt && spec.modifiers.once)
    throw std::invalid_argument(
        fmt::format("policy {}: with once, only the prompt's tokens are evicted, but prompt "
                    "protects all of them; use once=no",
                    spec.name));
  return spec;
}

ProtectedTokens resolve_protected_tokens(const PolicySpec& spec, std::uint32_t budget) {
  const std::uint32_t prompt = spec.protected_prompt_tokens(), beside = budget - prompt;
  const ProtectedTokens protected_tokens{std::max(prompt, spec.sinks.resolve(beside)),
                                         spec.recent.resolve(beside)};
  if (protected_tokens.sinks >= budget)
    throw BudgetTooSmall(
        fmt::format("policy {}: sinks={} should be below the budget of {} tokens", spec.name,
                    protected_tokens.sinks, budget),
        beside > 1 && prompt == 0 ? fmt::format("use {}:sinks={}", spec.name, beside / 2) : "");
  if (protected_tokens.recent > budget - protected_tokens.sinks)
    throw BudgetTooSmall(
        fmt::format("policy {}: sinks={} and recent={} tokens exceed the budget of {} tokens; "
                    "sinks + recent should be at most the budget",
                    spec.name, protected_tokens.sinks, protected_tokens.recent, budget),
        fmt::format("use {}:recent={}", spec.name, (budget - protected_tokens.sinks) / 2));
  return protected_tokens;
}

}  // namespace kvlab
