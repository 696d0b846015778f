#include "sim/oracles/future_mass.hpp"

#include <algorithm>
#include <numeric>

#include "policies/observation.hpp"

namespace kvlab {
namespace {

const std::uint64_t* masses_of(const void* params) {
  return *static_cast<const std::uint64_t* const*>(params);
}

void admit_nothing(void*, Tokens, std::size_t, const void*, const Step&) {}

RankType rank_by_mass(const void*, Tokens tokens, std::size_t count, const void* params,
                      const Step&, std::uint64_t* ranks) {
  for (std::size_t i = 0; i < count; ++i) ranks[i] = masses_of(params)[tokens.positions[i]];
  return RankType::whole;
}

std::size_t least_mass(const void*, Tokens tokens, std::size_t begin, std::size_t end,
                       const void* params, const Step&) {
  const std::uint32_t* const positions = tokens.positions;
  const auto* const least =
      std::min_element(positions + begin, positions + end, [&](std::uint32_t a, std::uint32_t b) {
        return masses_of(params)[a] < masses_of(params)[b];
      });
  return static_cast<std::size_t>(least - positions);
}

}  // namespace

PolicyOps future_mass_ops() {
  return {.info = {.name = "oracle_mass", .summary = "", .citation = ""},
          .params = {},
          .slot_bytes = 0,
          .params_bytes = sizeof(const std::uint64_t*),
          .write_params = nullptr,
          .admit = admit_nothing,
          .observe = nullptr,
          .observe_each = nullptr,
          .rank = rank_by_mass,
          .first_least = least_mass,
          .weight = [](std::uint32_t, const void*) { return 1.0f; },
          .tail = [](const void*) { return kNoTail; },
          .clear_padding = nullptr};
}

std::vector<std::byte> future_mass_params(const std::vector<std::uint64_t>& masses) {
  const std::uint64_t* const from = masses.data();
  const auto bytes = std::as_bytes(std::span(&from, 1));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::uint64_t> total_masses(std::uint32_t tokens, std::uint32_t group,
                                        SharedRows& rows) {
  std::vector<std::uint64_t> masses(tokens);
  for (std::uint32_t first = 0; first < tokens; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), tokens - first);
    rows.compute(first, count);
    for (std::uint32_t query = first; query < first + count; ++query)
      for (std::uint32_t head = 0; head < group; ++head) {
        const SharedRows::Row row = rows.row(query, head);
        for (std::uint32_t j = 0; j <= query; ++j)
          masses[j] += fixed_mass(1.0f, row.e[j] / row.sum);
      }
  }
  return masses;
}

void TopkRun::attend(std::uint32_t query, SharedRows& rows) {
  if (!wants_row(query)) return;
  measure_.begin_query(query);
  for (std::uint32_t head = 0; head < group_; ++head) attend_head(query, head, rows);
}

void TopkRun::attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows) {
  const SharedRows::Row row = rows.row(query, head);
  const SharedRows::Requests wanted = rows.requests(query, head);
  std::uint32_t most = 0;
  for (const Configuration& c : configurations_)
    most = std::max(most, std::min(c.budget, query + 1));
  order_.resize(query + 1);
  std::iota(order_.begin(), order_.end(), 0u);
  std::partial_sort(order_.begin(), order_.begin() + most, order_.end(),
                    [&](std::uint32_t a, std::uint32_t b) { return row.e[a] > row.e[b]; });

  for (std::size_t set = 0; set < configurations_.size(); ++set) {
    const Configuration& c = configurations_[set];
    double kept = 0;
    std::uint32_t hits = 0;
    const bool all = c.budget > query || c.uncut[query];
    for (std::uint32_t i = 0; !all && i < c.budget; ++i) {
      kept += static_cast<double>(row.e[order_[i]]);
      hits += order_[i] < query ? wanted.flags[order_[i]] : 0;
    }
    const double recall = all ? 1.0 : std::min(1.0, kept / static_cast<double>(row.sum));
    measure_.add(set, head, recall, all ? 0 : wanted.count - hits, wanted.count);
  }
}

}  // namespace kvlab
