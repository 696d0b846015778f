#include "sim/oracles/oracle.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "policies/observation.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {
namespace {

Oracle& oracle_of(const void* params) { return **static_cast<Oracle* const*>(params); }

RankType rank(const void*, Tokens tokens, std::size_t count, const void* params, const Step& step,
              std::uint64_t* ranks) {
  oracle_of(params).rank(tokens.positions, count, step, ranks);
  return RankType::whole;
}

std::size_t first_least(const void*, Tokens tokens, std::size_t begin, std::size_t end,
                        const void* params, const Step& step) {
  std::vector<std::uint64_t> ranks(end);
  oracle_of(params).rank(tokens.positions, end, step, ranks.data());
  return static_cast<std::size_t>(
      std::min_element(ranks.begin() + static_cast<std::ptrdiff_t>(begin), ranks.end()) -
      ranks.begin());
}

/// Calls look(query, head) for each, when their row is there.
template <class Look>
void for_rows(SharedRows& rows, std::uint32_t group, std::uint32_t first, std::uint32_t end,
              Look look) {
  for (; first < end; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), end - first);
    rows.compute(first, count);
    for (std::uint32_t query = first; query < first + count; ++query)
      for (std::uint32_t head = 0; head < group; ++head) look(query, head);
  }
}

}  // namespace

PolicyOps oracle_ops() {
  return {.info = {.name = "oracle", .summary = "", .citation = ""},
          .params = {},
          .slot_bytes = 0,
          .params_bytes = sizeof(Oracle*),
          .write_params = nullptr,
          .admit = [](void*, Tokens, std::size_t, const void*, const Step&) {},
          .observe = nullptr,
          .observe_each = nullptr,
          .rank = rank,
          .first_least = first_least,
          .weight = [](std::uint32_t, const void*) { return 1.0f; },
          .tail = [](const void*) { return kNoTail; },
          .clear_padding = nullptr};
}

std::vector<std::byte> oracle_params(Oracle& oracle) {
  Oracle* const from = &oracle;
  const auto bytes = std::as_bytes(std::span(&from, 1));
  return {bytes.begin(), bytes.end()};
}

MassOracle::MassOracle(const HeadView& view, SharedRows rows)
    : group_(view.group), rows_(std::move(rows)), all_(view.tokens), given_(view.tokens) {
  add(0, view.tokens, all_);
}

void MassOracle::add(std::uint32_t first, std::uint32_t end, std::vector<std::uint64_t>& masses) {
  for_rows(rows_, group_, first, end, [&](std::uint32_t query, std::uint32_t head) {
    const SharedRows::Row row = rows_.row(query, head);
    for (std::uint32_t j = 0; j <= query; ++j) masses[j] += fixed_mass(1.0f, row.e[j] / row.sum);
  });
}

void MassOracle::rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                      std::uint64_t* ranks) {
  add(std::exchange(spent_, step.now), step.now, given_);
  for (std::size_t i = 0; i < count; ++i) ranks[i] = all_[positions[i]] - given_[positions[i]];
}

HeadStats topk_stats(const QuerySpan& span, const HeadView& view, SharedRows rows,
                     std::uint32_t budget, const std::vector<bool>& uncut) {
  RowMeasure measure(&span, 1, {.group = view.group}, 1);
  for_rows(rows, view.group, 0, view.tokens, [&](std::uint32_t query, std::uint32_t head) {
    if (!span.contains(query)) return;
    if (head == 0) measure.begin_query(query);
    const SharedRows::Row row = rows.row(query, head);
    const SharedRows::Requests wanted = rows.requests(query, head);
    measure.add_wanted(head, wanted.count);
    if (budget > query || uncut[query]) return measure.add(0, head, 1, 0);
    std::vector<std::uint32_t> order(query + 1);
    std::iota(order.begin(), order.end(), 0u);
    std::partial_sort(order.begin(), order.begin() + budget, order.end(),
                      [&](std::uint32_t a, std::uint32_t b) { return row.e[a] > row.e[b]; });
    order.resize(budget);
    double kept = row.sink;
    std::uint32_t hits = 0;
    for (const std::uint32_t token : order) {
      kept += static_cast<double>(row.e[token]);
      hits += token < query ? wanted.flags[token] : 0;
    }
    measure.add(0, head, std::min(1.0, kept / static_cast<double>(row.sum)), wanted.count - hits);
  });
  return std::move(measure.take().front());
}

}  // namespace kvlab
