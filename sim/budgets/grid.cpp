#include "sim/budgets/grid.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "sim/budgets/budget_file.hpp"
#include "sim/replay.hpp"

namespace kvlab {
namespace {

bool same(const CacheConfig& a, const CacheConfig& b) {
  return a.policy.text() == b.policy.text() && a.budget.text() == b.budget.text() &&
         a.prefill.chunk == b.prefill.chunk && a.positions == b.positions;
}

template <class Parse>
auto parse_list(const std::vector<std::string>& texts, Parse parse) {
  std::vector<decltype(parse(texts.front()))> values;
  values.reserve(texts.size());
  for (const std::string& text : texts) values.push_back(parse(text));
  return values;
}

/// The lists of the grid, before they are multiplied.
struct Axes {
  std::vector<PolicySpec> policies;
  std::vector<Budget> budgets;
  std::vector<Prefill> prefills;
  std::vector<Positions> positions;
  std::uint64_t seed;
  double threshold;
};

/// As parse_policy, but says of a reference that it cannot run here, not that nobody knows it.
PolicySpec policy_from(const std::string& text, std::span<const std::string_view> references,
                       const CompiledPolicies& compiled) {
  if (references.empty() && is_reference(text))
    throw std::invalid_argument(fmt::format(
        "policy {}: is a reference of `kvlab replay`, which knows the future; name a policy",
        text));
  return parse_policy(text, references, compiled);
}

/// Every configuration of one policy, in the order of the lists.
std::vector<CacheConfig> configs_of(const PolicySpec& policy, const Axes& axes) {
  CacheConfig config{.policy = policy,
                     .prefill = axes.prefills.front(),
                     .seed = axes.seed,
                     .threshold = axes.threshold};
  if (!config.evicts()) return {config};  // nothing else could make a difference
  if (axes.budgets.empty())
    throw std::invalid_argument(fmt::format(
        "--budget: policy {} needs one; give tokens or a share: --budget 128,20%", policy.name));
  std::vector<Positions> positions = axes.positions;
  if (!policy.entry) positions = {Positions::original};
  if (positions.empty()) positions = {policy.entry->info.positions};

  std::vector<CacheConfig> configs;
  for (const Budget& budget : axes.budgets) {
    if (policy.entry && !budget.extent.is_share && !budget.in_bytes && !budget.all)
      resolve_guards(policy, budget.extent.tokens);
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

}  // namespace

std::vector<CacheConfig> make_grid(const GridRequest& request,
                                   std::span<const std::string_view> references,
                                   const CompiledPolicies& compiled) {
  Axes axes;
  axes.policies = parse_list(request.policies,
                             [&](const auto& t) { return policy_from(t, references, compiled); });
  axes.budgets = parse_list(request.budgets, [](const auto& t) { return read_budget(t); });
  axes.prefills = parse_list(request.prefills, [](const auto& t) { return parse_prefill(t); });
  axes.positions = parse_list(request.positions, [](const auto& t) { return parse_positions(t); });
  axes.seed = request.seed;
  axes.threshold = request.threshold;
  std::vector<CacheConfig> grid;
  for (const PolicySpec& policy : axes.policies)
    for (const CacheConfig& config : configs_of(policy, axes))
      if (std::none_of(grid.begin(), grid.end(), [&](const auto& c) { return same(c, config); }))
        grid.push_back(config);
  return grid;
}

}  // namespace kvlab
