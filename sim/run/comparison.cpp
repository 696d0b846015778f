#include "sim/run/comparison.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "policies/catalogue.hpp"
#include "traces/base/text.hpp"

namespace kvlab {

bool needs_no_more_memory(const Memory& own, const Memory& other) {
  return own.mean <= kSameMemory * other.mean && own.peak <= kSameMemory * other.peak;
}

std::string ComparisonScope::budget_text() const {
  const bool is_number =
      !budget.empty() && budget.find_first_not_of("0123456789") == std::string::npos;
  return budget + (is_number ? " tokens" : "");
}

double Recommendation::mean(std::size_t candidate) const {
  const double error = candidates[candidate].error;
  return scope.higher_is_better ? 0 - error : error;
}

const Difference& Recommendation::difference(std::size_t candidate) const {
  return from_choice[static_cast<std::size_t>(std::ranges::find(order, candidate) - order.begin())];
}

std::vector<std::size_t> Recommendation::similar() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] != choice && !from_choice[i].significantly_different()) found.push_back(order[i]);
  return found;
}

namespace {

/// Share of memory that a candidate must save to be chosen in place of the candidate with the
/// lowest mean.
constexpr double kLessMemory = 0.02;

bool is_known(const Difference& difference) { return !std::isnan(difference.interval.low); }

/// Sorts by error, lowest first, then by name.
void sort_by_error(std::vector<std::size_t>& which, const std::vector<Candidate>& candidates) {
  std::ranges::sort(which, {}, [&](std::size_t c) {
    return std::pair<double, std::string_view>(candidates[c].error, candidates[c].name);
  });
}

/// Returns the candidate to choose. By default, it is the candidate with the lowest mean. If some
/// candidates do not differ significantly from it and need at least 2% less memory, it is the one
/// of them that needs the least memory.
std::size_t choice_of(const Recommendation& from) {
  const std::size_t lowest = from.order.front();
  const auto memory = [&](std::size_t c) { return from.candidates[c].memory.mean; };
  std::size_t choice = lowest;
  for (std::size_t i = 1; i < from.order.size(); ++i) {
    const std::size_t c = from.order[i];
    const bool alike =
        is_known(from.from_lowest[i]) && !from.from_lowest[i].significantly_different();
    const bool less = memory(c) > 0 && memory(c) <= (1 - kLessMemory) * memory(lowest);
    if (alike && less && memory(c) < memory(choice)) choice = c;
  }
  return choice;
}

/// The candidates that no other candidate dominates, ordered by bytes. A candidate dominates
/// another if it does not need more memory and is significantly better.
std::vector<std::size_t> frontier_of(const std::vector<Candidate>& candidates,
                                     const DifferenceOf& difference) {
  std::vector<std::size_t> by_error(candidates.size()), frontier;
  std::iota(by_error.begin(), by_error.end(), std::size_t{0});
  sort_by_error(by_error, candidates);
  for (const std::size_t c : by_error) {
    const bool dominated = std::ranges::any_of(by_error, [&](std::size_t other) {
      return candidates[other].error < candidates[c].error &&
             needs_no_more_memory(candidates[other].memory, candidates[c].memory) &&
             difference(other, c).ahead();
    });
    if (!dominated) frontier.push_back(c);
  }
  std::ranges::stable_sort(frontier, {}, [&](std::size_t c) { return candidates[c].memory.mean; });
  return frontier;
}

}  // namespace

void make_names_different(std::vector<Candidate>& candidates,
                          std::span<const CacheConfig* const> configs) {
  std::map<std::string, std::vector<std::size_t>> same_name;
  for (std::size_t c = 0; c < candidates.size(); ++c) same_name[candidates[c].name].push_back(c);
  const auto texts_of = [&](std::size_t c) {
    const CacheConfig& config = *configs[c];
    return std::array{"at " + config.budget_text(), config.prefill.text(),
                      fmt::format("{} positions", name_of(config.positions)),
                      fmt::format("seed {}", config.seed)};
  };
  for (const auto& [name, same] : same_name) {
    if (same.size() < 2) continue;
    const auto first = texts_of(same.front());
    for (const std::size_t c : same) {
      const auto own = texts_of(c);
      std::vector<std::string> parts;
      for (std::size_t i = 0; i < own.size(); ++i)
        if (std::ranges::any_of(same, [&](std::size_t s) { return texts_of(s)[i] != first[i]; }))
          parts.push_back(own[i]);
      if (!parts.empty()) candidates[c].name += fmt::format(" ({})", fmt::join(parts, ", "));
    }
  }
}

Recommendation recommend(std::vector<Candidate> candidates, ComparisonScope scope,
                         const DifferenceOf& difference, Frontier frontier) {
  if (candidates.empty())
    throw std::invalid_argument("recommend: no candidates; at least one is needed");
  Recommendation made{.scope = std::move(scope), .candidates = std::move(candidates)};
  for (std::size_t c = 0; c < made.candidates.size(); ++c) {
    const bool fits = made.candidates[c].memory.peak <= kSameMemory * made.scope.budget_bytes;
    (fits ? made.order : made.over_budget).push_back(c);
  }
  made.none_eligible = made.order.empty();
  if (made.none_eligible) std::swap(made.order, made.over_budget);
  sort_by_error(made.order, made.candidates);
  sort_by_error(made.over_budget, made.candidates);
  const auto from = [&](std::size_t base) {
    std::vector<Difference> differences;
    for (const std::size_t c : made.order)
      differences.push_back(c == base ? Difference{} : difference(c, base));
    return differences;
  };
  made.from_lowest = from(made.order.front());
  made.choice = choice_of(made);
  made.for_memory = made.choice != made.order.front();
  made.from_choice = made.for_memory ? from(made.choice) : made.from_lowest;
  if (made.order.size() > 1) made.runner_up = made.for_memory ? made.order.front() : made.order[1];
  if (frontier == Frontier::compute) made.frontier = frontier_of(made.candidates, difference);
  return made;
}

std::size_t decisive_budget(std::span<const Recommendation> recommendations) {
  constexpr double kTypicalShare = 0.1;  // of the full cache's memory
  const auto distance = [](const Recommendation& one) {
    const double own = one.chosen_candidate().memory.mean, full = one.scope.full_bytes;
    return own > 0 && full > 0 ? std::fabs(std::log(own / (kTypicalShare * full))) : 0.0;
  };
  const auto decides = [](const Recommendation& one) {
    return one.runner_up && one.difference(*one.runner_up).is_worse();
  };
  std::size_t found = 0;
  for (std::size_t b = 1; b < recommendations.size(); ++b) {
    const Recommendation &one = recommendations[b], &best = recommendations[found];
    if (decides(one) != decides(best) ? decides(one) : distance(one) < distance(best)) found = b;
  }
  return found;
}

bool keeps_prompt(std::string_view params) {
  const std::vector<std::string> settings = split_list(params, ':');
  return std::ranges::find(settings, "prompt") != settings.end();
}

bool protected_tokens_fill(std::string_view policy, std::string_view params,
                           std::uint32_t budget_tokens) {
  if (policy == "window" || policy == "sink")
    return false;  // these policies are `window` with sinks in any case
  double num_protected = 0;
  const std::vector<std::string> settings = split_list(params, ':');
  const auto is_centre = [](const std::string& setting) { return setting.starts_with("centre="); };
  if (std::ranges::any_of(settings, is_centre) && budget_tokens > 1)
    --budget_tokens;  // the centre takes the memory of one token
  for (const std::string& setting : settings)
    if (setting.starts_with("tiers=")) {
      // With a tier plan, the bytes of the budget hold a different number of tokens.
      const TierPlan tier_plan = parse_tier_plan(setting.substr(6));
      budget_tokens =
          tier_plan.is_by_layer()
              ? tier_plan.tokens_by_layer(std::uint64_t{budget_tokens} * KvFormat{}.block_bytes())
              : tokens_of(tier_plan.slots_of_tokens(budget_tokens));
    }
  for (const std::string& setting : settings) {
    const std::size_t equals = setting.find('=') + 1;
    if (!setting.starts_with("sinks=") && !setting.starts_with("recent=")) continue;
    const double number = std::strtod(setting.c_str() + equals, nullptr);
    num_protected += setting.ends_with('%') ? std::floor(number * budget_tokens / 100) : number;
  }
  return num_protected >= budget_tokens;
}

}  // namespace kvlab
