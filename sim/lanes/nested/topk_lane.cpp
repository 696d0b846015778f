#include "sim/lanes/nested/topk_lane.hpp"

#include <algorithm>

namespace kvlab {
namespace {

std::vector<std::uint32_t> budgets_of(const LaneConfigs& configs) {
  std::vector<std::uint32_t> budgets;
  for (const ResolvedConfig* config : configs) budgets.push_back(config->budget_tokens);
  std::sort(budgets.begin(), budgets.end());
  budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
  return budgets;
}

}  // namespace

TopkLane::TopkLane(LaneConfigs configs, std::uint32_t group, const QuerySpan& span)
    : configs_(std::move(configs)),
      measure_(&span, configs_.size(), {.group = group}),
      sums_(budgets_of(configs_)) {
  const auto& budgets = sums_.budgets();
  for (const ResolvedConfig* config : configs_)
    level_.push_back(static_cast<std::size_t>(
        std::lower_bound(budgets.begin(), budgets.end(), config->budget_tokens) - budgets.begin()));
}

void TopkLane::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  for (std::uint32_t query = first; query < first + count; ++query)
    if (wants_row(query)) attend_query(query, rows);
}

void TopkLane::attend_query(std::uint32_t query, GroupRows& rows) {
  measure_.begin_query(query);
  bool cut = false;
  for (std::size_t c = 0; c < configs_.size(); ++c) cut |= !keeps_all(c, query);
  if (cut) sums_.begin_row(query, rows);
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (cut) sums_.take(head);
    measure(query, head, rows);
  }
}

/// Requested tokens are those from some exponential on, so they lead the row, the query's own among
/// them if it is as probable.
void TopkLane::measure(std::uint32_t query, std::uint32_t head, GroupRows& rows) {
  const float own = rows.e(query, head / kQuad)[query * kQuad + head % kQuad];
  const auto full = static_cast<double>(rows.sums(query)[head]);
  const GroupRows::Requests wanted = rows.requests(query);
  measure_.add_wanted(head, wanted.count[head]);
  const bool own_asks = own >= wanted.least[head];
  const std::uint32_t leading = wanted.count[head] + (own_asks ? 1 : 0);
  for (std::size_t c = 0; c < configs_.size(); ++c) {
    double recall = 1;
    std::uint32_t missed = 0;
    if (!keeps_all(c, query)) {
      const TopSums::Level& level = sums_.level(level_[c]);
      recall = std::min(1.0, level.sum / full);
      const bool keeps_own = own_asks && own >= level.least;
      missed = wanted.count[head] -
               (std::min(leading, configs_[c]->budget_tokens) - (keeps_own ? 1 : 0));
    }
    measure_.add(c, head, recall, missed);
  }
}

std::vector<HeadOutcome> TopkLane::outcomes() {
  std::vector<HeadOutcome> all;
  for (HeadStats& stats : measure_.take()) all.push_back({std::move(stats)});
  return all;
}

}  // namespace kvlab
