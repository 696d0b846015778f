#include <fmt/format.h>

#include <algorithm>

#include "policies/catalogue.hpp"
#include "policies/mass/presets.hpp"
#include "policies/modifiers/text.hpp"
#include "sim/replay.hpp"
#include "sim/report/describe_policy.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

struct OracleInfo {
  std::string_view name, summary, bounds;
};
constexpr OracleInfo kOracles[] = {
    {kOracleAttention,
     "evicts the token with the least future mass under the full cache, summed over the group",
     "nothing: it is a strong heuristic for recall, not a bound"},
    {kOracleTopk, "keeps for each query and query head its most probable tokens",
     "recall and misses, not output error"},
    {kOracleResidual,
     "evicts, one after another, the token whose loss changes the residual stream least over the "
     "next 32 queries; slow, so it runs only if it is named",
     "nothing: it is greedy, and it sees those 32 queries but not the other heads"},
    {kBelady,
     "with --refetch: evicts the token whose next selection is farthest in the future (Belady)",
     "the number of tokens that are fetched"}};

/// What a policy needs, for example "mass, the feature value_norm1".
std::string needs_of(const PolicyInfo& info) {
  std::string needs(name_of(info.needs));
  if (info.feature_count() == 0) return needs;
  const std::string features = fmt::format("feature {}", fmt::join(features_of(info), ", "));
  return info.needs == Needs::nothing ? features : needs + ", " + features;
}

/// The default protected tokens and modifiers: "sinks=4 recent=50% once", or "".
std::string protected_tokens_of(const PolicyInfo& info) {
  std::vector<std::string> parts;
  if (info.sinks != Extent{}) parts.push_back("sinks=" + text_of(info.sinks));
  if (info.recent != Extent{}) parts.push_back("recent=" + text_of(info.recent));
  for (std::string& text : modifier_texts(info.modifiers, {})) parts.push_back(std::move(text));
  return fmt::format("{}", fmt::join(parts, " "));
}

std::string describe(const ParamInfo& param) {
  return fmt::format("{}={} ({:g} to {:g}): {}", param.name, param.standard, param.min_value,
                     param.max_value, param.help);
}

std::string or_none(const std::string& text) { return text.empty() ? "none" : text; }

/// The registered policies, then those of --policy-source.
std::vector<PolicyEntry> all_entries(const CompiledPolicies& compiled) {
  std::vector<PolicyEntry> entries = policy_catalogue();
  for (const auto& entry : compiled.entries) entries.push_back(*entry);
  return entries;
}

void print_policy(const PolicyEntry& entry) {
  const PolicyInfo& info = entry.info;
  fmt::print("\n{}\n  {}\n", info.name, info.summary);
  if (info.evicts) fmt::print("  protected  {}\n", or_none(protected_tokens_of(info)));
  for (const ParamInfo& param : entry.params) fmt::print("  parameter  {}\n", describe(param));
  fmt::print("  needs      {}; {} bytes of state per slot\n", needs_of(info), entry.token_bytes());
  fmt::print("  order      {}\n  positions  {}\n  source     {}\n", name_of(info.order),
             name_of(info.positions), info.citation);
  if (entry.source)
    fmt::print("  compiled   from {} (xxh3 {})\n", entry.source->path, entry.source->xxh3);
}

void print_presets() {
  fmt::print("\nWhat other projects call H2O, written h2o:preset=NAME:\n\n");
  for (const Preset& preset : h2o_presets())
    fmt::print("  {:15}  {:35}  {}\n", preset.name,
               preset.policy.empty() ? "not possible here" : preset.policy, preset.code);
}

void print_oracle(const OracleInfo& oracle) {
  fmt::print("\n{}\n  {}\n  bounds     {}\n", oracle.name, oracle.summary, oracle.bounds);
}

void print_text(const std::vector<PolicyEntry>& entries) {
  fmt::print(
      "A policy is written name:param=value:sinks=N:recent=N, such as h2o:sinks=4:recent=25%.\n"
      "Any policy that evicts has protected tokens (sinks and recent: tokens, or a share of the "
      "budget)\nand the modifiers every=W, once, smooth=R, pool=mean|max, scope=head|layer, "
      "group=sum|max.\n");
  for (const PolicyEntry& entry : entries) print_policy(entry);
  print_presets();
  fmt::print(
      "\nOracles, for comparison only (never deployed, no parameters, no protected tokens):\n");
  for (const OracleInfo& oracle : kOracles) print_oracle(oracle);
}

/// Prints the description of one policy or oracle. Throws std::invalid_argument if the name is
/// unknown.
void print_named(const std::vector<PolicyEntry>& entries, const std::string& name) {
  const auto entry = std::ranges::find_if(
      entries, [&](const PolicyEntry& known) { return known.info.name == name; });
  if (entry != entries.end()) {
    print_policy(*entry);
    if (name == "h2o") print_presets();
    return;
  }
  for (const OracleInfo& oracle : kOracles)
    if (oracle.name == name) return print_oracle(oracle);
  parse_policy(name);  // throws with an explanation if the name is unknown
  throw std::invalid_argument(
      fmt::format("policy {}: give the name only: {}", name, name.substr(0, name.find(':'))));
}

std::string code_or_blank(const std::string& text) {
  return text.empty() ? "" : fmt::format("`{}`", text);
}

/// Prints the two tables of docs/reference/policies.md.
void print_markdown(const std::vector<PolicyEntry>& entries) {
  fmt::print(
      "| policy | what it does | needs | order | protected tokens | parameters | positions | bytes "
      "per slot | source |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const PolicyEntry& entry : entries) {
    const PolicyInfo& info = entry.info;
    std::vector<std::string> params;
    for (const ParamInfo& param : entry.params) params.push_back(describe(param));
    fmt::print("| `{}` | {} | {} | {} | {} | {} | {} | {} | {} |\n", info.name, info.summary,
               needs_of(info), name_of(info.order), code_or_blank(protected_tokens_of(info)),
               fmt::join(params, "; "), name_of(info.positions), entry.token_bytes(),
               info.citation);
  }
  fmt::print("\n| oracle | what it does | bounds |\n| --- | --- | --- |\n");
  for (const OracleInfo& oracle : kOracles)
    fmt::print("| `{}` | {} | {} |\n", oracle.name, oracle.summary, oracle.bounds);
}

ordered_json to_json(const std::vector<PolicyEntry>& entries) {
  ordered_json policies = ordered_json::array(), oracles = ordered_json::array(),
               presets = ordered_json::array();
  for (const PolicyEntry& entry : entries) policies.push_back(describe_policy(entry));
  for (const OracleInfo& oracle : kOracles)
    oracles.push_back(
        {{"name", oracle.name}, {"summary", oracle.summary}, {"bounds", oracle.bounds}});
  for (const Preset& preset : h2o_presets())
    presets.push_back({{"name", preset.name},
                       {"policy", preset.policy},
                       {"code", preset.code},
                       {"deviates", preset.deviates}});
  return {{"policies", policies}, {"oracles", oracles}, {"h2o_presets", presets}};
}

struct Request {
  std::vector<std::string> names, sources;
  bool json = false, markdown = false;
};

void add_options(OptionTable& table, Request& request) {
  table.texts("name", "NAME", Takes::one_word, request.names,
              "policies to describe (default: all); the word `--name` may be left out");
  add_json_option(table, request.json);
  table.flag("markdown", request.markdown, "print the tables of docs/reference/policies.md");
  add_source_option(table, request.sources);
}

void check(Request& request, const GivenOptions& given) {
  if (request.json && request.markdown)
    throw std::invalid_argument("--json and --markdown exclude each other; give one of them");
  if (!request.names.empty()) given.refuse({"json", "markdown"}, "is for the list of all policies");
}

int run(const Request& request) {
  const auto entries = all_entries(compiled_policies({.sources = request.sources}));
  if (!request.names.empty())
    for (const std::string& name : request.names) print_named(entries, name);
  else if (request.json)
    print_json(to_json(entries));
  else if (request.markdown)
    print_markdown(entries);
  else
    print_text(entries);
  return 0;
}

}  // namespace

Command policies_command() {
  return {.name = "policies",
          .summary = "describes every policy, or the named ones",
          .usage = "[NAME...] [--json | --markdown] [--policy-source FILE.hpp]...",
          .example = "kvlab policies h2o",
          .positional = "name",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
