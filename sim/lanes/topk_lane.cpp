#include "sim/lanes/topk_lane.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace kvlab {
namespace {

/// Sorts exponentials, the smallest first, by three passes over eleven bits: the bits of floats
/// that are not negative are in their order. `room` has the size of `row`.
void sort_row(std::vector<std::uint32_t>& row, std::vector<std::uint32_t>& room) {
  constexpr std::uint32_t kBits = 11, kBuckets = 1u << kBits, kPasses = 3;
  std::array<std::array<std::uint32_t, kBuckets>, kPasses> starts{};
  for (const std::uint32_t bits : row)
    for (std::uint32_t pass = 0; pass < kPasses; ++pass)
      ++starts[pass][bits >> pass * kBits & (kBuckets - 1)];
  for (auto& counts : starts) std::exclusive_scan(counts.begin(), counts.end(), counts.begin(), 0u);
  for (std::uint32_t pass = 0; pass < kPasses; ++pass) {
    for (const std::uint32_t bits : row)
      room[starts[pass][bits >> pass * kBits & (kBuckets - 1)]++] = bits;
    row.swap(room);
  }
}

}  // namespace

TopkLane::TopkLane(std::vector<LaneConfig> configs, std::uint32_t group, const QuerySpan& span)
    : configs_(std::move(configs)), stats_(configs_.size()), span_(span) {
  for (HeadStats& stats : stats_) stats.resize(span, group);
}

void TopkLane::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  for (std::uint32_t query = first; query < first + count; ++query)
    if (wants_row(query))
      for (std::uint32_t head = 0; head < rows.group(); ++head) attend_head(query, head, rows);
}

void TopkLane::attend_head(std::uint32_t query, std::uint32_t head, GroupRows& rows) {
  const float* const e = rows.e(query, head / kQuad) + head % kQuad;
  const float full = rows.sums(query)[head], own = e[query * kQuad];
  const GroupRows::Requests wanted = rows.requests(query);
  std::uint32_t most = 0;
  for (const LaneConfig& c : configs_)
    if (c.budget <= query && !c.uncut[query]) most = std::max(most, c.budget);
  sorted_.resize(query + 1);
  room_.resize(query + 1);
  if (most > 0) {
    for (std::uint32_t j = 0; j <= query; ++j)
      sorted_[j] = std::bit_cast<std::uint32_t>(e[j * kQuad]);
    sort_row(sorted_, room_);
  }
  const auto nth = [&](std::uint32_t i) { return std::bit_cast<float>(sorted_[query - i]); };

  // Requested tokens are those from some exponential on, so they lead the row, the query's own
  // among them if it is as probable.
  const bool own_asks = own >= wanted.least[head];
  const std::uint32_t leading = wanted.count[head] + (own_asks ? 1 : 0);
  const std::uint32_t block = span_.block(query);
  std::vector<double> running(most + std::size_t{1});
  for (std::uint32_t i = 0; i < most; ++i)
    running[i + 1] = running[i] + static_cast<double>(nth(i));
  for (std::size_t c = 0; c < configs_.size(); ++c) {
    const std::uint32_t budget = configs_[c].budget;
    const bool all = budget > query || configs_[c].uncut[query];
    double recall = 1;
    std::uint32_t missed = 0;
    if (!all) {
      recall = std::min(1.0, running[budget] / static_cast<double>(full));
      const bool keeps_own = own_asks && own >= nth(budget - 1);
      missed = wanted.count[head] - (std::min(leading, budget) - (keeps_own ? 1 : 0));
    }
    stats_[c].add_recall(block, head, recall);
    stats_[c].heads[head].miss.add(block, missed, wanted.count[head]);
  }
}

std::vector<LaneOutcome> TopkLane::outcomes() {
  std::vector<LaneOutcome> all;
  for (HeadStats& stats : stats_) all.push_back({std::move(stats)});
  return all;
}

}  // namespace kvlab
