#include "engine/loop/fidelity/fidelity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "sim/run/results.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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

/// One metric against KL over the same texts.
class Comparison {
 public:
  Comparison(std::span<const FidelityText> texts, const std::string& metric) {
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
                          .rho_interval = {},
                          .rho_single = kNaN,
                          .regret = choice.regret,
                          .worst_regret = 0,
                          .chosen = choice.chosen,
                          .best = choice.best};
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

 private:
  double rho(std::span<const std::size_t> texts, std::span<const std::size_t> which) const {
    return spearman(picked(mean_over(cost_, texts), which), picked(mean_over(kl_, texts), which));
  }
  std::vector<Values> kl_, cost_;  // [text][configuration]
  std::vector<std::size_t> all_;   // texts
};

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

TraceReader capture(Backend& backend, const std::filesystem::path& path,
                    const std::vector<std::int32_t>& ids, const FidelityOptions& options) {
  TraceWriter writer(path, backend.trace_header({{"teacher_forced", true}}));
  writer.sketch(options.sketch);
  const auto decoder = backend.capturing_decoder(
      ResolvedConfig{}, static_cast<std::uint32_t>(ids.size()), writer, {});
  const std::span all(ids);
  decoder->feed(all.first(options.prompt_tokens), SegmentKind::prompt);
  decoder->feed(all.subspan(options.prompt_tokens), SegmentKind::decode);
  decoder->flush();
  writer.finish();
  return TraceReader::open(path);
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

Fidelity assess_fidelity(std::span<const CacheConfig> configs,
                         std::span<const FidelityText> texts) {
  const std::vector<BudgetGroup> budgets = by_budget(configs);
  std::vector<std::size_t> everything(configs.size());
  std::iota(everything.begin(), everything.end(), std::size_t{0});
  Fidelity result;
  for (const auto& [metric, values] : texts.front().figures) {
    const Comparison comparison(texts, metric);
    FidelityMetric own{metric, {}, comparison.pooled(everything)};
    for (const BudgetGroup& group : budgets)
      own.within.push_back(comparison.within(group.budget, group.configs));
    result.metrics.push_back(std::move(own));
  }
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

FidelityText measure_fidelity(Backend& backend, const Sweep& sweep, const std::string& name,
                              const std::vector<std::int32_t>& ids,
                              std::span<const CacheConfig> configs,
                              const FidelityOptions& options) {
  FidelityText text{.name = name, .kl = {}, .figures = {}};
  const TraceReader trace = capture(backend, options.traces / name, ids, options);
  const ReplayResult replayed = replay(
      trace, 0, configs,
      {.elsewhere = options.device, .threads = options.threads, .layers = {}, .progress = {}});
  for (const Measurement& row : replayed.measurements)
    if (row.layer < 0 && find_metric(row.metric)->ranks)
      text.figures.try_emplace(row.metric, Values(configs.size(), kNaN)).first->second[row.config] =
          row.value;

  std::vector<CacheConfig> with_full{CacheConfig{}};
  with_full.insert(with_full.end(), configs.begin(), configs.end());
  const auto scores = sweep({ids}, with_full,
                            {.prompt_tokens = options.prompt_tokens,
                             .threads = options.threads,
                             .progress = options.progress});
  for (std::size_t c = 0; c < configs.size(); ++c)
    text.kl.push_back(mean_of_finite(scores[0][c + 1].kl));
  return text;
}

}  // namespace kvlab
