#include "sim/oracles/oracle.hpp"

#include <algorithm>
#include <limits>
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

std::size_t find_min_rank(const void*, Tokens tokens, std::size_t begin, std::size_t end,
                          const void* params, const Step& step) {
  std::vector<std::uint64_t> ranks(end);
  oracle_of(params).rank(tokens.positions, end, step, ranks.data());
  return static_cast<std::size_t>(
      std::min_element(ranks.begin() + static_cast<std::ptrdiff_t>(begin), ranks.end()) -
      ranks.begin());
}

/// Computes the rows of queries [first, end) and calls look(query, head) for each of them.
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

constexpr std::uint32_t kColumns = ResidualOracle::kColumns;
// Lower bound of the probability of the tokens that remain after an eviction.
constexpr float kMinSum = 1e-20f;

}  // namespace

PolicyOps oracle_ops() {
  return {.info = {.name = "oracle", .summary = "", .citation = ""},
          .params = {},
          .slot_bytes = 0,
          .params_bytes = sizeof(Oracle*),
          .write_params = nullptr,
          .append = [](void*, Tokens, std::size_t, const void*, const Step&) {},
          .observe = nullptr,
          .observe_each = nullptr,
          .rank = rank,
          .find_min_rank = find_min_rank,
          .weight = [](std::uint32_t, const void*) { return 1.0f; },
          .tail = [](const void*) { return kNoTail; },
          .clear_padding = nullptr};
}

std::vector<std::byte> oracle_params(Oracle& oracle) {
  Oracle* const from = &oracle;
  const auto bytes = std::as_bytes(std::span(&from, 1));
  return {bytes.begin(), bytes.end()};
}

AttentionOracle::AttentionOracle(const HeadView& view, SharedRows rows)
    : group_(view.group), rows_(std::move(rows)), all_(view.tokens), given_(view.tokens) {
  add(0, view.tokens, all_);
}

void AttentionOracle::add(std::uint32_t first, std::uint32_t end,
                          std::vector<std::uint64_t>& masses) {
  for_rows(rows_, group_, first, end, [&](std::uint32_t query, std::uint32_t head) {
    const SharedRows::Row row = rows_.row(query, head);
    for (std::uint32_t j = 0; j <= query; ++j) masses[j] += fixed_mass(1.0f, row.e[j] / row.sum);
  });
}

void AttentionOracle::rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                           std::uint64_t* ranks) {
  add(std::exchange(spent_, step.now), step.now, given_);
  for (std::size_t i = 0; i < count; ++i) ranks[i] = all_[positions[i]] - given_[positions[i]];
}

HeadStats topk_stats(const MeasuredQueries& measured, const HeadView& view, SharedRows rows,
                     std::uint32_t budget, const std::vector<bool>& uncut) {
  RowMeasure measure(&measured, 1, {.group = view.group}, 1);
  for_rows(rows, view.group, 0, view.tokens, [&](std::uint32_t query, std::uint32_t head) {
    if (!measured.contains(query)) return;
    if (head == 0) measure.begin_query(query);
    const SharedRows::Row row = rows.row(query, head);
    const SharedRows::Requests wanted = rows.requests(query, head);
    QueryResult result{
        .recall = 1, .position = query, .live = query + 1, .wanted = wanted.count, .missed = 0};
    if (budget > query || uncut[query]) return measure.add(0, head, result);
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
    result.recall = std::min(1.0, kept / static_cast<double>(row.sum));
    result.live = budget;
    result.missed = wanted.count - hits;
    measure.add(0, head, result);
  });
  return std::move(measure.take().front());
}

/// Sums over the tokens that remain, for a query head: Σ p and Σ p · W_o v.
struct ResidualOracle::Sums {
  float p = 0;
  float values[kColumns] = {};

  void add(float factor, const float* value) {
    p += factor;
    for (std::uint32_t c = 0; c < kColumns; ++c) values[c] += factor * value[c];
  }
};

ResidualOracle::ResidualOracle(const HeadView& view, SharedRows& rows,
                               const std::vector<float>& sketch, std::vector<float> norm2)
    : tokens_(view.tokens),
      group_(view.group),
      p_(std::size_t{tokens_} * (tokens_ + 1) / 2 * group_),
      projected_(std::size_t{group_} * tokens_ * kColumns),
      full_(std::size_t{tokens_} * kColumns),
      norm2_(std::move(norm2)) {
  for (std::uint32_t head = 0; head < group_; ++head)
    for (std::uint32_t token = 0; token < tokens_; ++token) {
      const float* const value = view.v + token * view.kv_token_stride;
      const float* map = sketch.data() + std::size_t{head} * view.head_size * kColumns;
      float* const to = projected_.data() + (std::size_t{head} * tokens_ + token) * kColumns;
      for (std::uint32_t d = 0; d < view.head_size; ++d, map += kColumns)
        for (std::uint32_t c = 0; c < kColumns; ++c) to[c] += value[d] * map[c];
    }
  for (std::uint32_t first = 0; first < tokens_; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), tokens_ - first);
    rows.compute(first, count);
    for (std::uint32_t query = first; query < first + count; ++query)
      for (std::uint32_t head = 0; head < group_; ++head) {
        const SharedRows::Row row = rows.row(query, head);
        float* const p = p_.data() + this->row(query, head);
        sinks_.push_back(row.sink / row.sum);
        Sums all;
        for (std::uint32_t j = 0; j <= query; ++j) {
          p[j] = row.e[j] / row.sum;
          all.add(p[j], projected_value(head, j));
        }
        for (std::uint32_t c = 0; c < kColumns; ++c)
          full_[std::size_t{query} * kColumns + c] += all.values[c];
      }
  }
}

void ResidualOracle::rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                          std::uint64_t* ranks) {
  const std::uint32_t last = std::min(step.now + kAhead, tokens_);
  std::vector<Sums> sums;  // [query - step.now, group]
  for (std::uint32_t query = step.now; query < last; ++query)
    for (std::uint32_t head = 0; head < group_; ++head) {
      const float* const p = probabilities(query, head);
      Sums& own = sums.emplace_back(Sums{.p = sinks_[std::size_t{query} * group_ + head]});
      for (std::size_t i = 0; i < count; ++i)
        own.add(p[positions[i]], projected_value(head, positions[i]));
      for (std::uint32_t later = step.now; later <= query; ++later)
        own.add(p[later], projected_value(head, later));
    }
  const std::size_t num_evicted = count + 1 - std::min<std::size_t>(step.budget, count + 1);
  for (std::size_t i = 0; i < count; ++i) ranks[i] = count + i;
  for (std::size_t left = 0; left < num_evicted; ++left) {
    std::size_t best = count;
    double min_change = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < count; ++i) {
      if (ranks[i] < count) continue;
      const double change = change_without(positions[i], sums, step.now);
      if (best < count && !(change < min_change)) continue;
      best = i;
      min_change = change;
    }
    ranks[best] = left;
    for (std::uint32_t query = step.now; query < last; ++query)
      for (std::uint32_t head = 0; head < group_; ++head)
        sums[(query - step.now) * group_ + head].add(-probabilities(query, head)[positions[best]],
                                                     projected_value(head, positions[best]));
  }
}

/// The residual error if `token` were also evicted, summed over the queries.
double ResidualOracle::change_without(std::uint32_t token, const std::vector<Sums>& sums,
                                      std::uint32_t now) const {
  double change = 0;
  for (std::size_t i = 0; i < sums.size(); i += group_) {
    const std::uint32_t query = now + static_cast<std::uint32_t>(i / group_);
    float error[kColumns];
    std::copy_n(full_.data() + std::size_t{query} * kColumns, kColumns, error);
    for (std::uint32_t head = 0; head < group_; ++head) {
      const Sums& own = sums[i + head];
      const float p = probabilities(query, head)[token];
      const float* const value = projected_value(head, token);
      const float factor = 1 / std::max(own.p - p, kMinSum);
      for (std::uint32_t c = 0; c < kColumns; ++c)
        error[c] -= (own.values[c] - p * value[c]) * factor;
    }
    float squares = 0;
    for (const float e : error) squares += e * e;
    change += static_cast<double>(squares / norm2_[query]);
  }
  return change;
}

}  // namespace kvlab
