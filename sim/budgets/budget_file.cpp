#include "sim/budgets/budget_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "policies/catalogue.hpp"
#include "sim/plan/centre_file.hpp"
#include "sim/replay.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBudgetBytes = std::size_t{16} << 20;

}  // namespace

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

/// A text that is equal for two configurations if their results cannot differ.
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

/// The parsed lists, of which the sweep has all combinations.
struct Axes {
  std::vector<PolicySpec> policies;
  std::vector<Budget> budgets;
  std::vector<Prefill> prefills;
  std::vector<Positions> positions;
  std::uint64_t seed;
  double threshold;
};

/// Parses a policy as parse_policy() does, and reads the policy's centre file. If the policy is an
/// oracle that cannot run here, the error says so. parse_policy() would only say that the name is
/// unknown.
PolicySpec policy_from(const std::string& text, std::span<const std::string_view> oracles,
                       const CompiledPolicies& compiled) {
  if (oracles.empty() && is_oracle(text))
    throw std::invalid_argument(
        fmt::format("policy {}: this is an oracle, which uses future attention and runs only in "
                    "`kvlab replay`; "
                    "give a policy",
                    text));
  PolicySpec policy = parse_policy(text, oracles, compiled);
  load_centre(policy.centre);
  return policy;
}

/// Checks that the protected tokens fit a budget in tokens. Other budgets depend on the length of
/// the text, which is not known yet.
void check_protected_tokens(const CacheConfig& config) {
  const Budget& budget = config.budget;
  if (config.evicts() && config.policy.entry && !budget.extent.is_share && !budget.in_bytes &&
      !budget.all)
    resolve_protected_tokens(config.policy, budget.extent.tokens);
}

/// All combinations of one policy with the lists, in the order of the lists.
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

/// Refuses sweeps that are too large. It runs before any list is parsed, because parsed entries
/// need memory and making all combinations takes time.
void refuse_many(const SweepRequest& request) {
  std::size_t configs = std::max<std::size_t>(request.policies.size(), 1);
  const auto check = [&](std::size_t count) {
    if (count > kMaxConfigs)
      throw std::invalid_argument(
          fmt::format("up to {} configurations are requested, but at most {} are allowed; give "
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
  if (axes.prefills.empty())
    throw std::invalid_argument("prefill: empty; give dense, chunk:N, stream, or a list of them");
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
