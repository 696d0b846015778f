#include "sim/run/kept.hpp"

#include <algorithm>
#include <limits>
#include <map>

#include "sim/run/ranking.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMostQueries = 512;
constexpr std::size_t kMostSeries = 6;

/// The configurations to show: those at `budget` with the first one's prefill, each policy and
/// parameters once, and the oracle last.
std::vector<const CacheConfig*> shown(std::span<const CacheConfig> grid, std::string_view budget) {
  std::vector<const CacheConfig*> configs;
  const CacheConfig* oracle = nullptr;
  const CacheConfig* first = nullptr;
  for (const CacheConfig& config : grid) {
    if (config.budget.text() != budget || config.policy.name == kOracleTopk) continue;
    if (!first) first = &config;
    if (config.prefill.chunk != first->prefill.chunk) continue;
    if (config.policy.name == kOracleMass) {
      oracle = &config;
      continue;
    }
    const bool known = std::any_of(configs.begin(), configs.end(), [&](const CacheConfig* other) {
      return other->policy.text() == config.policy.text();
    });
    if (!known && configs.size() < kMostSeries) configs.push_back(&config);
  }
  if (oracle) configs.push_back(oracle);
  return configs;
}

/// The head on which the policies' recall is furthest apart at `budget`; the first such.
Scope most_telling_head(std::span<const ResultRow> rows, std::string_view budget) {
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
  const auto widest =
      std::max_element(spreads.begin(), spreads.end(), [](const auto& a, const auto& b) {
        return a.second.most - a.second.least < b.second.most - b.second.least;
      });
  return widest == spreads.end() ? Scope{} : widest->first;
}

/// At most kMostQueries positions of the span, evenly.
std::vector<std::uint32_t> shown_queries(const TraceReader& trace, Span span) {
  std::vector<std::uint32_t> all, queries;
  for (const Segment& segment : trace.segments())
    if (span == Span::all || segment.kind == SegmentKind::decode)
      for (std::uint32_t i = 0; i < segment.tokens; ++i) all.push_back(segment.start + i);
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
  const Scope head = most_telling_head(rows, budget.text);
  const auto configs = shown(grid, budget.text);
  if (configs.empty() || head.head < 0) return std::nullopt;

  Kept kept{.trace = std::string(trace_name),
            .budget = budget.text,
            .prefill = configs.front()->prefill.text(),
            .budget_tokens = budget.least_tokens,
            .layer = static_cast<std::uint32_t>(head.layer),
            .head = static_cast<std::uint32_t>(head.head),
            .queries = shown_queries(trace, options.span),
            .series = std::vector<KeptSeries>(configs.size())};
  parallel_for(configs.size(), options.threads, [&](std::size_t i) {
    const CacheConfig& config = *configs[i];
    const auto sets =
        kept_sets(trace, sequence, config, options, kept.layer, kept.head, kept.queries);
    kept.series[i] = {config.policy.name, config.policy.params_text(),
                      std::string(name_of(config.positions)), lifetimes_of(sets)};
  });
  return kept;
}

}  // namespace kvlab
