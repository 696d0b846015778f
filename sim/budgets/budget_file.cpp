#include "sim/budgets/budget_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "policies/catalogue.hpp"
#include "sim/replay.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBudgetBytes = std::size_t{16} << 20;

std::uint32_t tokens_from(const json& value, const std::string& where) {
  const std::uint32_t tokens = whole_number(value, where);
  if (tokens == 0 || tokens > 0x7fff'ffffu)
    throw std::runtime_error(where + ": should be a number of tokens, at least 1");
  return tokens;
}

}  // namespace

Budget budget_from_json(const json& value, const std::string& where, std::string file) {
  if (!value.is_array())
    return {.extent = tokens(tokens_from(value, where)), .file = std::move(file)};
  HeadBudgets heads;
  const auto first = std::ranges::find_if(value, [](const json& v) { return !v.is_null(); });
  const bool by_head = first != value.end() && first->is_array();
  for (const json& layer : value) {
    const std::string at = fmt::format("{}[{}]", where, heads.size());
    if (layer.is_null()) {
      heads.emplace_back(by_head ? first->size() : 1, kNoBudget);
      continue;
    }
    if (layer.is_array() != by_head)
      throw std::runtime_error(
          at + (by_head ? ": should be a list of tokens, one for each KV head, as before"
                        : ": should be a number of tokens, as before"));
    auto& own = heads.emplace_back();
    if (!by_head) own.push_back(tokens_from(layer, at));
    if (by_head)
      for (const json& head : layer)
        own.push_back(tokens_from(head, fmt::format("{}[{}]", at, own.size())));
  }
  try {
    return budget_of_heads(std::move(heads), std::move(file));
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}{}", where, error.what()));
  }
}

Budget read_budget(std::string_view text) {
  if (!text.starts_with('@')) return parse_budget(text);
  const std::string file(text.substr(1));
  if (file.empty()) throw std::invalid_argument("budget: '@' should be followed by a file's path");
  return budget_from_json(parse_json(read_text_file(file, kMaxBudgetBytes), file),
                          file + ": budgets", file);
}

json budgets_json(const HeadBudgets& heads) {
  json layers = json::array();
  for (const auto& layer : heads)
    layers.push_back(layer.front() == kNoBudget ? json(nullptr) : json(layer));
  return layers;
}

std::string budgets_text(const HeadBudgets& heads) {
  std::string text = "[";
  for (const auto& layer : heads)
    text += fmt::format(
        "{}\n  {}", text.size() > 1 ? "," : "",
        layer.front() == kNoBudget ? "null" : fmt::format("[{}]", fmt::join(layer, ", ")));
  return text + "\n]\n";
}

namespace {

/// Equal for two configurations whose results cannot differ.
std::string identity_of(const CacheConfig& config) {
  return fmt::format("{}\n{}\n{}\n{}", config.policy.text(), config.budget.text(),
                     config.prefill.chunk, static_cast<int>(config.positions));
}

template <class Parse>
auto parse_list(const std::vector<std::string>& texts, Parse parse) {
  std::vector<decltype(parse(texts.front()))> values;
  values.reserve(texts.size());
  for (const std::string& text : texts) values.push_back(parse(text));
  return values;
}

/// The parsed lists whose product is the sweep.
struct Axes {
  std::vector<PolicySpec> policies;
  std::vector<Budget> budgets;
  std::vector<Prefill> prefills;
  std::vector<Positions> positions;
  std::uint64_t seed;
  double threshold;
};

/// As parse_policy(), but for an oracle it says that an oracle cannot run here, not that the name
/// is unknown.
PolicySpec policy_from(const std::string& text, std::span<const std::string_view> oracles,
                       const CompiledPolicies& compiled) {
  if (oracles.empty() && is_oracle(text))
    throw std::invalid_argument(fmt::format(
        "policy {}: is an oracle of `kvlab replay`, which uses future attention; give a policy",
        text));
  return parse_policy(text, oracles, compiled);
}

/// Checks a budget in tokens. Other budgets depend on the length, which is not yet known.
void check_protected_tokens(const CacheConfig& config) {
  const Budget& budget = config.budget;
  if (config.evicts() && config.policy.entry && !budget.extent.is_share && !budget.in_bytes &&
      !budget.all)
    resolve_protected_tokens(config.policy, budget.extent.tokens);
}

/// Every configuration of one policy, in the order of the lists.
std::vector<CacheConfig> configs_of(const PolicySpec& policy, const Axes& axes) {
  CacheConfig config{.policy = policy,
                     .prefill = axes.prefills.front(),
                     .seed = axes.seed,
                     .threshold = axes.threshold};
  if (!config.evicts()) return {config};  // no other setting has an effect
  if (axes.budgets.empty())
    throw std::invalid_argument(fmt::format(
        "--budget: policy {} needs one; give tokens or a share: --budget 128,20%", policy.name));
  std::vector<Positions> positions = axes.positions;
  if (!policy.entry) positions = {Positions::original};
  if (positions.empty()) positions = {policy.entry->info.positions};

  std::vector<CacheConfig> configs;
  for (const Budget& budget : axes.budgets) {
    config.budget = budget;
    for (const Prefill& prefill : axes.prefills)
      for (const Positions position : positions) {
        config.prefill = prefill;
        config.positions = position;
        configs.push_back(config);
      }
  }
  return configs;
}

/// Runs before any list is parsed, because each entry takes memory and their product takes time.
void refuse_many(const SweepRequest& request) {
  std::size_t configs = std::max<std::size_t>(request.policies.size(), 1);
  const auto check = [&](std::size_t count) {
    if (count > kMaxConfigs)
      throw std::invalid_argument(
          fmt::format("up to {} configurations are requested, and at most {} are allowed; give "
                      "fewer policies, budgets, tier plans or modes",
                      count, kMaxConfigs));
  };
  check(configs);
  for (const auto* const list : {&request.budgets, &request.prefills, &request.positions}) {
    check(list->size());
    configs *= std::max<std::size_t>(list->size(), 1);
    check(configs);
  }
}

}  // namespace

std::vector<CacheConfig> make_sweep(const SweepRequest& request,
                                    std::span<const std::string_view> oracles,
                                    const CompiledPolicies& compiled, const LeaveOut& leave_out) {
  refuse_many(request);
  Axes axes;
  axes.policies = parse_list(request.policies,
                             [&](const auto& t) { return policy_from(t, oracles, compiled); });
  axes.budgets = parse_list(request.budgets, [](const auto& t) { return read_budget(t); });
  axes.prefills = parse_list(request.prefills, [](const auto& t) { return parse_prefill(t); });
  axes.positions = parse_list(request.positions, [](const auto& t) { return parse_positions(t); });
  axes.seed = request.seed;
  axes.threshold = request.threshold;
  std::vector<CacheConfig> sweep;
  std::unordered_set<std::string> known;
  for (const PolicySpec& policy : axes.policies)
    for (CacheConfig& config : configs_of(policy, axes))
      if (known.insert(identity_of(config)).second) sweep.push_back(std::move(config));
  return configs_that_fit(std::move(sweep), check_protected_tokens, leave_out);
}

}  // namespace kvlab
