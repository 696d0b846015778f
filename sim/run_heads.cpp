#include "sim/run_heads.hpp"

#include <algorithm>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

bool anybody_wants(std::uint32_t first, std::uint32_t count,
                   std::span<const std::unique_ptr<HeadRun>> runs) {
  for (std::uint32_t query = first; query < first + count; ++query)
    for (const auto& run : runs)
      if (run->wants_row(query)) return true;
  return false;
}

}  // namespace

void run_head(QueryRange queries, SharedRows& rows,
              std::span<const std::unique_ptr<HeadRun>> runs) {
  for (std::uint32_t first = queries.begin; first < queries.end; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), queries.end - first);
    throw_if_cancelled();
    if (anybody_wants(first, count, runs)) rows.compute(first, count);
    for (const auto& run : runs)
      for (std::uint32_t query = first; query < first + count; ++query) run->attend(query, rows);
  }
}

void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs) {
  for (const LayerRun& run : runs) {
    std::vector<AgedSet*> caches;
    for (const auto& head : run) caches.push_back(&head->aged());
    share_ranks(caches);
  }
  const std::uint32_t block = rows.front().block_queries();
  for (std::uint32_t first = queries.begin; first < queries.end; first += block) {
    const std::uint32_t count = std::min(block, queries.end - first);
    throw_if_cancelled();
    if (std::ranges::any_of(runs, [&](auto& run) { return anybody_wants(first, count, run); }))
      for (SharedRows& head : rows) head.compute(first, count);
    for (const LayerRun& run : runs)
      for (std::uint32_t query = first; query < first + count; ++query)
        for (std::size_t head = 0; head < rows.size(); ++head) run[head]->attend(query, rows[head]);
  }
}

}  // namespace kvlab
