#include "engine/loop/tune/grid.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvlab {
namespace {

constexpr std::uint32_t kSinks[] = {0, 4};
constexpr std::uint32_t kRecent[] = {25, 50, 75, 90};  // percent

std::vector<Extent> recent_of(const PolicyInfo& info) {
  std::vector<Extent> values;
  if (info.recent == Extent{} || info.oldest_first) values.push_back(info.recent);
  if (info.oldest_first) return values;  // whatever is guarded, the oldest leave first
  for (const std::uint32_t share : kRecent) values.push_back(percent(share));
  if (std::ranges::find(values, info.recent) == values.end()) values.push_back(info.recent);
  return values;
}

std::vector<Extent> sinks_of(const PolicyInfo& info) {
  std::vector<Extent> values;
  for (const std::uint32_t count : kSinks) values.push_back(tokens(count));
  if (std::ranges::find(values, info.sinks) == values.end()) values.push_back(info.sinks);
  return values;
}

/// Parameters as asked, then each of them at other values.
std::vector<std::vector<double>> parameters_of(const PolicySpec& spec) {
  std::vector<std::vector<double>> all{spec.params};
  for (std::size_t i = 0; i < spec.params.size(); ++i) {
    const auto& param = spec.entry->params[i];
    for (const double value : parameter_values(param.standard, param.least, param.most)) {
      if (value == spec.params[i]) continue;
      all.push_back(spec.params);
      all.back()[i] = value;
    }
  }
  return all;
}

bool fits(const PolicySpec& spec, std::uint32_t budget_tokens) {
  try {
    resolve_guards(spec, budget_tokens);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace

std::vector<std::string> tunable_policies(const CompiledPolicies& compiled) {
  std::vector<std::string> names;
  const auto add = [&](const PolicyEntry& entry) {
    const PolicyInfo& info = entry.info;
    if (info.evicts && info.column_count() == 0 && !info.modifiers.once &&
        std::string_view(info.name) != "random")
      names.emplace_back(entry.info.name);
  };
  for (const PolicyEntry& entry : policy_catalogue()) add(entry);
  for (const auto& entry : compiled.entries) add(*entry);
  return names;
}

std::vector<double> parameter_values(double standard, double least, double most) {
  std::vector<double> values{standard};
  // A share near 1 (a decay) is told by what it lacks of 1.
  const bool share = least >= 0 && most <= 1 && standard > 0.5 && standard < 1;
  const bool whole = standard >= 2 && standard == std::floor(standard);
  for (const double factor : {0.25, 4.0}) {
    double value = share ? 1 - factor * (1 - standard) : factor * standard;
    if (whole) value = std::max(1.0, std::round(value));
    if (share) value = std::round(value * 1e9) / 1e9;  // 0.92, not 0.9199999999999999
    values.push_back(std::clamp(value, least, most));
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled) {
  const PolicySpec asked = parse_policy(text, {}, compiled);
  if (!asked.entry->info.evicts)
    throw std::invalid_argument(fmt::format(
        "--policy: {} never evicts, so there is nothing to tune; leave it out", asked.name));
  if (text.find(':') != std::string::npos) {
    resolve_guards(asked, budget_tokens);
    return {asked};
  }
  std::vector<PolicySpec> variants;
  for (const std::vector<double>& params : parameters_of(asked))
    for (const Extent sinks : sinks_of(asked.entry->info))
      for (const Extent recent : recent_of(asked.entry->info)) {
        PolicySpec spec = asked;
        spec.params = params, spec.sinks = sinks, spec.recent = recent;
        if (fits(spec, budget_tokens)) variants.push_back(std::move(spec));
      }
  return variants;
}

}  // namespace kvlab
