#include "engine/loop/fidelity/fidelity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "sim/run/results.hpp"
#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

using Values = std::vector<double>;

double mean_of_finite(const Values& values) {
  double sum = 0, count = 0;
  for (const double value : values)
    if (std::isfinite(value)) sum += value, ++count;
  return count > 0 ? sum / count : kNaN;
}

/// A text's values of a metric, lower being better.
Values cost_of(const FidelityText& text, const std::string& metric) {
  Values values = text.figures.at(metric);
  if (find_metric(metric)->higher_is_better)
    for (double& value : values) value = -value;
  return values;
}

/// The mean over some texts of values [text][configuration].
Values mean_over(const std::vector<Values>& values, std::span<const std::size_t> texts) {
  Values mean(values.front().size());
  for (const std::size_t text : texts)
    for (std::size_t c = 0; c < mean.size(); ++c)
      mean[c] += values[text][c] / static_cast<double>(texts.size());
  return mean;
}

Values picked(const Values& values, std::span<const std::size_t> which) {
  Values some;
  for (const std::size_t c : which) some.push_back(values[c]);
  return some;
}

struct Choice {
  std::size_t chosen, best;
  double regret;
};
Choice choice_of(const Values& cost, const Values& kl, std::span<const std::size_t> which) {
  const auto least = [&](const Values& values) {
    return *std::min_element(which.begin(), which.end(),
                             [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  };
  const std::size_t chosen = least(cost), best = least(kl);
  return {chosen, best, kl[chosen] / kl[best]};
}

struct BudgetGroup {
  std::string budget;
  std::vector<std::size_t> configs;
};
std::vector<BudgetGroup> by_budget(std::span<const CacheConfig> configs) {
  std::vector<BudgetGroup> groups;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    const std::string budget = configs[c].budget.text();
    auto found = std::find_if(groups.begin(), groups.end(),
                              [&](const BudgetGroup& group) { return group.budget == budget; });
    if (found == groups.end()) found = groups.insert(found, BudgetGroup{budget, {}});
    found->configs.push_back(c);
  }
  for (const BudgetGroup& group : groups)
    if (group.configs.size() < 3)
      throw std::invalid_argument(
          fmt::format("budget {}: {} policies cannot be put in order; at least 3 are needed",
                      group.budget, group.configs.size()));
  return groups;
}

/// The pairs of a budget's configurations that KL tells apart: [better, worse].
using Apart = std::vector<std::pair<std::size_t, std::size_t>>;
Apart pairs_apart(std::span<const FidelityText> texts, const BudgetGroup& group) {
  PairedScores kl(group.configs.size());
  for (const FidelityText& text : texts) {
    std::vector<std::span<const double>> scores;
    for (const std::size_t c : group.configs) scores.emplace_back(text.kl_tokens[c]);
    kl.add_tokens(std::to_string(&text - texts.data()), scores);
  }
  Apart apart;
  for (std::size_t a = 0; a < group.configs.size(); ++a)
    for (std::size_t b = 0; b < group.configs.size(); ++b)
      if (a != b && kl.difference(a, b).ahead())
        apart.emplace_back(group.configs[a], group.configs[b]);
  return apart;
}

/// One metric against KL over the same texts.
class MetricAgainstKl {
 public:
  MetricAgainstKl(std::span<const FidelityText> texts, const std::string& metric) {
    for (const FidelityText& text : texts) {
      kl_.push_back(text.kl);
      cost_.push_back(cost_of(text, metric));
      all_.push_back(all_.size());
    }
  }

  FidelityBudget within(const std::string& budget, std::span<const std::size_t> which) const {
    const Choice choice = choice_of(mean_over(cost_, all_), mean_over(kl_, all_), which);
    FidelityBudget result{.budget = budget,
                          .rho = rho(all_, which),
                          .rho_single = kNaN,
                          .regret = choice.regret,
                          .worst_regret = 0,
                          .chosen = choice.chosen,
                          .best = choice.best,
                          .told_apart = 0};
    Values single;
    for (const std::size_t text : all_) {
      single.push_back(rho(std::span(&text, 1), which));
      result.worst_regret =
          std::max(result.worst_regret, choice_of(cost_[text], kl_[text], which).regret);
    }
    result.rho_single = mean_of_finite(single);
    result.rho_interval = bootstrap(
        all_.size(), [&](std::span<const std::size_t> texts) { return rho(texts, which); });
    return result;
  }
  double pooled(std::span<const std::size_t> which) const { return rho(all_, which); }

  /// Of the pairs that KL tells apart, those that the figure orders the other way.
  std::vector<Misordered> misordered(const Apart& apart) const {
    const Values cost = mean_over(cost_, all_), kl = mean_over(kl_, all_);
    std::vector<Misordered> wrong;
    for (const auto& [better, worse] : apart)
      if (cost[worse] < cost[better]) wrong.push_back({worse, better, kl[worse] / kl[better]});
    std::ranges::stable_sort(wrong, std::greater<>{}, &Misordered::ratio);
    return wrong;
  }

 private:
  double rho(std::span<const std::size_t> texts, std::span<const std::size_t> which) const {
    return spearman(picked(mean_over(cost_, texts), which), picked(mean_over(kl_, texts), which));
  }
  std::vector<Values> kl_, cost_;  // [text][configuration]
  std::vector<std::size_t> all_;   // texts
};

/// Metrics that every text has.
std::vector<std::string> common_metrics(std::span<const FidelityText> texts) {
  std::vector<std::string> names;
  for (const auto& entry : texts.front().figures)
    if (find_metric(entry.first)->ranks &&
        std::ranges::all_of(
            texts, [&](const FidelityText& text) { return text.figures.contains(entry.first); }))
      names.push_back(entry.first);
  return names;
}

}  // namespace

void check_fidelity_grid(std::span<const CacheConfig> configs) {
  for (const CacheConfig& config : configs)
    if (!config.evicts())
      throw std::invalid_argument(
          fmt::format("--policy: {} never evicts, so there is nothing to predict; leave it out",
                      config.policy.text()));
  by_budget(configs);
}

FidelityText fidelity_text(const LoopText& text, std::vector<std::vector<double>> kl_tokens,
                           OpenLoopFigures figures) {
  FidelityText result{.name = text.name,
                      .tokens = static_cast<std::uint32_t>(text.ids.size()),
                      .prompt_tokens = text.prompt_tokens,
                      .kl_tokens = std::move(kl_tokens),
                      .figures = std::move(figures)};
  for (const Values& tokens : result.kl_tokens) result.kl.push_back(spread_of(tokens).mean);
  return result;
}

std::string standard_figure(std::span<const OpenLoopFigures> figures) {
  return std::string(best_metric([&](const std::string& metric) {
    return std::ranges::all_of(figures, [&](const auto& text) { return text.contains(metric); });
  }));
}

const FidelityMetric* Fidelity::find(const std::string& metric) const {
  const auto found = std::ranges::find(metrics, metric, &FidelityMetric::metric);
  return found == metrics.end() ? nullptr : &*found;
}

Fidelity assess_fidelity(std::span<const CacheConfig> configs,
                         std::span<const FidelityText> texts) {
  const std::vector<BudgetGroup> budgets = by_budget(configs);
  std::vector<Apart> apart;
  for (const BudgetGroup& group : budgets) apart.push_back(pairs_apart(texts, group));
  std::vector<std::size_t> everything(configs.size());
  std::iota(everything.begin(), everything.end(), std::size_t{0});
  Fidelity result;
  for (const std::string& metric : common_metrics(texts)) {
    const MetricAgainstKl comparison(texts, metric);
    FidelityMetric own{metric, {}, comparison.pooled(everything)};
    for (std::size_t b = 0; b < budgets.size(); ++b) {
      own.within.push_back(comparison.within(budgets[b].budget, budgets[b].configs));
      own.within.back().told_apart = apart[b].size();
      own.within.back().misordered = comparison.misordered(apart[b]);
    }
    result.metrics.push_back(std::move(own));
  }
  std::vector<OpenLoopFigures> figures;
  for (const FidelityText& text : texts) figures.push_back(text.figures);
  result.standard = standard_figure(figures);
  for (const BudgetGroup& group : budgets) {
    Values pairs;
    for (std::size_t a = 0; a < texts.size(); ++a)
      for (std::size_t b = a + 1; b < texts.size(); ++b)
        pairs.push_back(
            spearman(picked(texts[a].kl, group.configs), picked(texts[b].kl, group.configs)));
    result.ceiling.push_back(mean_of_finite(pairs));
  }
  return result;
}

}  // namespace kvlab
