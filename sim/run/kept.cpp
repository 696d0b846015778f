#include "sim/run/kept.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "sim/access/full_attention.hpp"
#include "sim/metrics.hpp"
#include "sim/run/ranking.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMostQueries = 512;
constexpr std::size_t kMostSeries = 6;
constexpr std::size_t kMostHeads = 2;

/// The configurations to show: those at `budget` with the first one's prefill, each policy and
/// parameters once. First the winner, then window and the one that the winner beats most narrowly,
/// then as they rank; the oracle last.
std::vector<const CacheConfig*> shown(std::span<const CacheConfig> grid, const Figures& figures,
                                      std::string_view budget, const MetricInfo& metric) {
  std::vector<const CacheConfig*> configs;
  const CacheConfig* oracle = nullptr;
  const CacheConfig* first = nullptr;
  for (const CacheConfig& config : grid) {
    if (config.budget.text() != budget || config.policy.name == kOracleTopk) continue;
    if (!first) first = &config;
    if (config.prefill.chunk != first->prefill.chunk) continue;
    const bool known = std::any_of(configs.begin(), configs.end(), [&](const CacheConfig* other) {
      return other->policy.text() == config.policy.text();
    });
    if (config.policy.name == kOracleMass)
      oracle = &config;
    else if (!known)
      configs.push_back(&config);
  }
  const auto standings = rank_policies(figures, budget, metric).standings;
  const auto place = [&](const CacheConfig* config) {
    for (std::size_t i = 0; i < standings.size(); ++i) {
      const Series& series = figures.series()[standings[i].series];
      if (series.policy == config->policy.name && series.params == config->policy.params_text())
        return i > 1 && series.policy == "window" ? std::size_t{2} : 2 * i + (i > 1);
    }
    return 2 * standings.size() + 1;
  };
  std::ranges::stable_sort(configs, {}, place);
  if (configs.size() > kMostSeries) configs.resize(kMostSeries);
  if (oracle) configs.push_back(oracle);
  return configs;
}

/// The heads on which the policies' recall is furthest apart at `budget`, the widest first, each of
/// another layer while there are any.
std::vector<Scope> telling_heads(std::span<const ResultRow> rows, std::string_view budget) {
  struct Spread {
    double least = std::numeric_limits<double>::infinity(), most = -least;
  };
  std::map<Scope, Spread> spreads;
  for (const ResultRow& row : rows) {
    if (row.head < 0 || row.budget != budget || row.metric != "recall") continue;
    if (is_reference(row.policy)) continue;
    Spread& spread = spreads[{row.layer, row.head}];
    spread.least = std::min(spread.least, row.value);
    spread.most = std::max(spread.most, row.value);
  }
  std::vector<Scope> heads;
  while (heads.size() < kMostHeads && !spreads.empty()) {
    const auto widest =
        std::max_element(spreads.begin(), spreads.end(), [](const auto& a, const auto& b) {
          return a.second.most - a.second.least < b.second.most - b.second.least;
        });
    const Scope head = widest->first;
    heads.push_back(head);
    const bool other_layers = std::ranges::any_of(
        spreads, [&](const auto& entry) { return entry.first.layer != head.layer; });
    std::erase_if(spreads, [&](const auto& entry) {
      return other_layers ? entry.first.layer == head.layer : entry.first.head == head.head;
    });
  }
  return heads;
}

/// What is worth a shade: one level of 255, of the root of a probability, so that little is seen.
std::vector<Glance> glances_of(const std::vector<float>& attention) {
  constexpr std::uint32_t kFaintest = 10;  // a probability of 0.0015
  std::vector<Glance> glances;
  for (std::uint32_t j = 0; j < attention.size(); ++j) {
    const auto level = static_cast<std::uint32_t>(std::lround(255 * std::sqrt(attention[j])));
    if (level >= kFaintest) glances.push_back({j, level});
  }
  return glances;
}

/// At most kMostQueries positions of the span, evenly.
std::vector<std::uint32_t> shown_queries(const TraceReader& trace, Span span) {
  const auto all = QuerySpan(trace.segments(), span, 1).sampled_queries();
  std::vector<std::uint32_t> queries;
  const std::size_t count = std::min(all.size(), kMostQueries);
  for (std::size_t i = 0; i < count; ++i)
    queries.push_back(all[count < 2 ? 0 : i * (all.size() - 1) / (count - 1)]);
  return queries;
}

}  // namespace

std::optional<Kept> kept_over_time(const TraceReader& trace, std::uint32_t sequence,
                                   std::string_view trace_name, std::span<const CacheConfig> grid,
                                   const ReplayOptions& options, std::span<const ResultRow> rows) {
  const Figures figures(rows);
  if (figures.budgets().empty()) return std::nullopt;
  const BudgetColumn& budget = figures.budgets()[(figures.budgets().size() - 1) / 2];
  const auto heads = telling_heads(rows, budget.text);
  const auto configs = shown(grid, figures, budget.text, *find_metric(best_metric(rows)));
  if (configs.empty() || heads.empty()) return std::nullopt;

  Kept kept{.trace = std::string(trace_name),
            .budget = budget.text,
            .prefill = configs.front()->prefill.text(),
            .budget_tokens = budget.least_tokens,
            .queries = shown_queries(trace, options.span),
            .ids = trace.ids(),
            .heads = std::vector<KeptHead>(heads.size())};
  for (std::size_t h = 0; h < heads.size(); ++h)
    kept.heads[h] = {static_cast<std::uint32_t>(heads[h].layer),
                     static_cast<std::uint32_t>(heads[h].head),
                     std::vector<KeptSeries>(configs.size()),
                     {}};
  // One job more for each head: its attention.
  const std::size_t jobs = configs.size() + 1;
  parallel_for(heads.size() * jobs, options.threads, [&](std::size_t i) {
    KeptHead& head = kept.heads[i / jobs];
    const CacheConfig& config = *configs[std::min(i % jobs, configs.size() - 1)];
    if (i % jobs == configs.size()) {
      FullAttention full(trace, trace.shape().layer_of(head.layer), head.head, config.threshold);
      for (const std::uint32_t query : kept.queries)
        head.attention.push_back(glances_of(full.mean_row(query)));
      return;
    }
    const auto sets =
        kept_sets(trace, sequence, config, options, head.layer, head.head, kept.queries);
    head.series[i % jobs] = {config.policy.name, config.policy.params_text(),
                             std::string(name_of(config.positions)), lifetimes_of(sets)};
  });
  return kept;
}

}  // namespace kvlab
