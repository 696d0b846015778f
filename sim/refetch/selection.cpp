#include "sim/refetch/selection.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

/// The positions of the `count` largest values, ascending. Among equal values, the lower positions
/// come first.
std::vector<std::uint32_t> largest(std::span<const float> values, std::size_t count) {
  std::vector<std::uint32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0u);
  if (count >= order.size()) return order;
  const auto first = [&](std::uint32_t a, std::uint32_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  };
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(order.begin(), end, order.end(), first);
  order.erase(end, order.end());
  std::ranges::sort(order);
  return order;
}

/// For each token before `query`, the largest of the probabilities that the query heads give it in
/// the full cache.
std::vector<float> largest_probabilities(std::uint32_t query, std::uint32_t group,
                                         const SharedRows& rows) {
  std::vector<float> max_shares(query);
  for (std::uint32_t head = 0; head < group; ++head) {
    const SharedRows::Row full = rows.row(query, head);
    for (std::uint32_t j = 0; j < query; ++j)
      max_shares[j] = std::max(max_shares[j], full.e[j] / full.sum);
  }
  return max_shares;
}

// `page:P:K`, after Quest: a page is represented by the smallest and the largest value of its keys
// in each dimension. These values give an upper bound of a query's score for every key of the page.

class Pages {
 public:
  Pages(std::uint32_t page, const HeadView& view, const RopeTable& rope,
        const HeadArithmetic& arithmetic)
      : page_(page), view_(view), rope_(rope), arithmetic_(arithmetic) {
    const std::size_t dim = view.head_size, count = view.tokens / page;
    min_values_.assign(count * dim, std::numeric_limits<float>::infinity());
    max_values_.assign(count * dim, -std::numeric_limits<float>::infinity());
    std::vector<float> key(dim);
    for (std::uint32_t token = 0; token < count * page; ++token) {
      rotate_original(rope, arithmetic, view.key(token), view.head_size, token, key.data());
      const std::size_t first = token / page * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        min_values_[first + d] = std::min(min_values_[first + d], key[d]);
        max_values_[first + d] = std::max(max_values_[first + d], key[d]);
      }
    }
  }

  /// Selects the page of the query's token and the earlier pages with the largest bounds. In all,
  /// it selects at most `tokens` tokens.
  std::vector<std::uint32_t> select(std::uint32_t query, std::uint32_t tokens) const {
    const std::uint32_t newest = query / page_;
    std::vector<std::uint32_t> selected;
    for (const std::uint32_t page : largest(bounds(query, newest), tokens / page_ - 1))
      for (std::uint32_t i = 0; i < page_; ++i) selected.push_back(page * page_ + i);
    for (std::uint32_t j = newest * page_; j < query; ++j) selected.push_back(j);
    return selected;
  }

 private:
  /// The bounds of pages [0, count). A softmax over the pages makes the bounds of different query
  /// heads comparable. The bound of a page is then the largest over the query heads.
  std::vector<float> bounds(std::uint32_t query, std::uint32_t count) const {
    std::vector<float> q(view_.head_size), all(count), own(count);
    for (std::uint32_t head = 0; head < view_.group && count > 0; ++head) {
      rotate_original(rope_, arithmetic_, view_.query(head, query), view_.head_size, query,
                      q.data());
      for (std::uint32_t page = 0; page < count; ++page)
        own[page] = arithmetic_.softmax_scale * bound(q, page);
      const float largest = *std::ranges::max_element(own);
      float sum = 0;
      for (float& x : own) sum += x = std::exp(x - largest);
      for (std::uint32_t page = 0; page < count; ++page)
        all[page] = std::max(all[page], own[page] / sum);
    }
    return all;
  }
  float bound(std::span<const float> q, std::uint32_t page) const {
    const std::size_t first = std::size_t{page} * q.size();
    float bound = 0;
    for (std::size_t d = 0; d < q.size(); ++d)
      bound += std::max(q[d] * min_values_[first + d], q[d] * max_values_[first + d]);
    return bound;
  }

  std::uint32_t page_;
  const HeadView& view_;
  const RopeTable& rope_;
  const HeadArithmetic& arithmetic_;
  std::vector<float> min_values_,
      max_values_;  // [page, dim]: smallest and largest values of the keys
};

std::uint32_t count_common(std::span<const std::uint32_t> a, std::span<const std::uint32_t> b) {
  std::vector<std::uint32_t> both;
  std::ranges::set_intersection(a, b, std::back_inserter(both));
  return static_cast<std::uint32_t>(both.size());
}

/// Calls each(query, largest probability of each token before it) for each measured query.
template <class Each>
void for_each_row(const MeasuredQueries& measured, std::uint32_t tokens, std::uint32_t group,
                  SharedRows& rows, Each each) {
  for (std::uint32_t first = 0; first < tokens; first += rows.block_queries()) {
    const std::uint32_t end = std::min(first + rows.block_queries(), tokens);
    throw_if_cancelled();
    bool computed = false;
    for (std::uint32_t query = first; query < end; ++query) {
      if (!measured.contains(query)) continue;
      if (!std::exchange(computed, true)) rows.compute(first, end - first);
      each(query, largest_probabilities(query, group, rows));
    }
  }
}

}  // namespace

void Selection::set(std::uint32_t query, std::span<const std::uint32_t> positions,
                    std::optional<std::uint32_t> agreed) {
  queries_[query] = {positions_.size(), static_cast<std::uint32_t>(positions.size()), agreed};
  positions_.insert(positions_.end(), positions.begin(), positions.end());
}

Selection select_tokens(const Selector& selector, const HeadView& view, const RopeTable& rope,
                        const HeadArithmetic& arithmetic, const MeasuredQueries& measured,
                        SharedRows& rows) {
  Selection selection(view.tokens);
  std::optional<const Pages> pages;
  if (selector.kind == Selector::Kind::page) pages.emplace(selector.page, view, rope, arithmetic);
  for_each_row(measured, view.tokens, view.group, rows,
               [&](std::uint32_t query, const std::vector<float>& p) {
                 if (!pages) return selection.set(query, largest(p, selector.tokens));
                 const auto own = pages->select(query, selector.tokens);
                 selection.set(query, own, count_common(own, largest(p, own.size())));
               });
  return selection;
}

Selection logged_selections(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                            const MeasuredQueries& measured, SharedRows* rows) {
  Selection selection(trace.tokens());
  trace.selections(layer, kv_head,
                   [&](std::uint32_t query, std::span<const std::uint32_t> positions) {
                     // The query's own token is the last one. It is never fetched.
                     if (!positions.empty() && positions.back() == query)
                       positions = positions.first(positions.size() - 1);
                     if (measured.contains(query)) selection.set(query, positions);
                   });
  if (!rows) return selection;
  for_each_row(measured, trace.tokens(), trace.shape().group(), *rows,
               [&](std::uint32_t query, const std::vector<float>& p) {
                 const auto own = selection.positions(query);
                 selection.set_agreed(query, count_common(own, largest(p, own.size())));
               });
  return selection;
}

}  // namespace kvlab
