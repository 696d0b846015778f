#include "tests/conformance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>

#include "tests/policies/unmodified.hpp"

namespace kvlab::test {
namespace {

constexpr std::size_t kFactors = 6;
/// An index into each list: policy, modifiers, tier plan, budget, prefill, positions.
using Row = std::array<std::uint16_t, kFactors>;

std::string spell(const std::string& policy, const std::string& modifiers) {
  return modifiers == "own" ? policy : unmodified(policy, modifiers);
}

/// The configuration of a row. Returns nullopt if it is invalid.
std::optional<CacheConfig> config_of(const Choices& from, const Row& row, std::uint32_t length,
                                     const CacheShape& model) {
  try {
    std::string policy = spell(from.policies[row[0]], from.modifiers[row[1]]);
    if (!from.tier_plans[row[2]].empty()) policy += ":tiers=" + from.tier_plans[row[2]];
    CacheConfig config{.policy = parse_policy(policy),
                       .budget = from.budgets[row[3]],
                       .prefill = from.prefills[row[4]],
                       .positions = from.positions[row[5]],
                       .seed = 11};
    resolve(config.at_prompt(length / 3), length, 0, model);
    return config;
  } catch (const std::invalid_argument&) {
    return {};
  }
}

std::array<std::size_t, kFactors> sizes(const Choices& from) {
  return {from.policies.size(), from.modifiers.size(), from.tier_plans.size(),
          from.budgets.size(),  from.prefills.size(),  from.positions.size()};
}

/// Throws if some entry of a list occurs in no valid row. A row that only the executor refuses is
/// valid.
void check_each_is_met(const Choices& from,
                       const std::array<std::set<std::uint16_t>, kFactors>& met) {
  constexpr std::array kLists{"policies", "modifiers", "tier_plans",
                              "budgets",  "prefills",  "positions"};
  const auto counts = sizes(from);
  for (std::size_t f = 0; f < kFactors; ++f)
    for (std::uint16_t i = 0; i < counts[f]; ++i)
      if (!met[f].contains(i))
        throw std::logic_error(
            fmt::format("conformance: choice {} of list {} goes with nothing", i, kLists[f]));
}

/// The pairs of choices in a row.
std::vector<std::size_t> pairs_of(const Row& row) {
  std::vector<std::size_t> pairs;
  for (std::size_t a = 0; a < kFactors; ++a)
    for (std::size_t b = a + 1; b < kFactors; ++b)
      pairs.push_back(((a * kFactors + b) * 128 + row[a]) * 128 + row[b]);
  return pairs;
}

std::vector<Row> sample(const std::vector<Row>& rows) {
  std::vector<bool> left(kFactors * kFactors * 128 * 128);
  for (const Row& row : rows)
    for (const std::size_t pair : pairs_of(row)) left[pair] = true;
  std::vector<Row> chosen;
  for (std::ptrdiff_t missing = kFactors * (kFactors - 1) / 2; missing > 0; --missing)
    for (const Row& row : rows) {  // takes the rows that add `missing` new pairs
      const auto pairs = pairs_of(row);
      if (std::ranges::count_if(pairs, [&](std::size_t pair) { return left[pair]; }) < missing)
        continue;
      for (const std::size_t pair : pairs) left[pair] = false;
      chosen.push_back(row);
    }
  return chosen;
}

}  // namespace

std::vector<Budget> budgets_about(std::uint32_t tokens, const CacheShape& model) {
  HeadBudgets heads(model.layers, std::vector<std::uint32_t>(model.kv_heads));
  std::uint32_t next = 0;
  // `heads` has a budget for each head. `layers` has equal budgets within a layer, as scope=layer
  // requires.
  for (auto& layer : heads)
    for (std::uint32_t& own : layer) own = tokens * (4 + next++ * 5 % 7) / 6;
  HeadBudgets layers = heads;
  for (auto& layer : layers) std::ranges::fill(layer, layer.front());
  std::vector<Budget> budgets = {parse_budget(std::to_string(tokens)),
                                 parse_budget(fmt::format("pyramid({})", tokens)),
                                 parse_budget(fmt::format("ada({})", tokens)),
                                 budget_of_heads(heads), budget_of_heads(layers)};
  if (model.layers > 1) {
    std::ranges::fill(layers[model.layers / 2], kNoBudget);
    budgets.push_back(budget_of_heads(layers));
  }
  return budgets;
}

std::vector<CacheConfig> covering(const Choices& choices, const Executor* executor,
                                  std::uint32_t length, const CacheShape& model) {
  Choices from = choices;
  if (from.policies.empty())
    for (const PolicyEntry& entry : policy_catalogue())
      if (const CacheConfig alone{.policy = parse_policy(entry.info.name)};
          alone.evicts() && (!executor || refusal(*executor, alone).empty()))
        from.policies.push_back(entry.info.name);
  from.policies.insert(from.policies.end(), choices.beside.begin(), choices.beside.end());
  const auto counts = sizes(from);
  std::vector<Row> rows;
  std::array<std::set<std::uint16_t>, kFactors> met;
  std::size_t all = 1;
  for (const std::size_t size : counts) all *= size;
  for (std::size_t i = 0; i < all; ++i) {
    Row row{};
    std::size_t rest = i;
    for (std::size_t f = 0; f < kFactors; rest /= counts[f++])
      row[f] = static_cast<std::uint16_t>(rest % counts[f]);
    const auto config = config_of(from, row, length, model);
    if (!config) continue;
    for (std::size_t f = 0; f < kFactors; ++f) met[f].insert(row[f]);
    if (!executor || refusal(*executor, *config).empty()) rows.push_back(row);
  }
  check_each_is_met(from, met);
  std::ranges::shuffle(rows, std::mt19937(1));
  if (!std::getenv("KVLAB_EVERY")) rows = sample(rows);
  std::vector<CacheConfig> chosen;
  // If a policy has no default modifiers, "own" and "" give the same configuration, which is kept
  // once.
  std::set<std::string> texts;
  for (const Row& row : rows) {
    const CacheConfig config = *config_of(from, row, length, model);
    if (texts.insert(text_of(config)).second) chosen.push_back(config);
  }
  return chosen;
}

std::string text_of(const CacheConfig& config) {
  return fmt::format("{} budget {} prefill {} positions {}", config.policy.text(),
                     config.budget.text(), config.prefill.text(), name_of(config.positions));
}

std::shared_ptr<const CentreConstants> some_centres(const CacheShape& model) {
  CentreConstants centres{model.kv_heads, model.head_size};
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (std::uint32_t i = 0; i < model.kv_heads * model.head_size; ++i)
      centres.layers[layer].push_back(0.01f * static_cast<float>(i % 37) - 0.1f);
  return std::make_shared<const CentreConstants>(std::move(centres));
}

}  // namespace kvlab::test
