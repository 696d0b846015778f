#include "sim/access/full_attention.hpp"

#include <algorithm>
#include <numeric>

#include "traces/base/cancel.hpp"

namespace kvlab {

FullAttention::FullAttention(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                             double threshold)
    : tensors_(read_head(trace, layer, kv_head)),
      rope_(trace.row(layer).rope, trace.tokens()),
      rows_(tensors_.view, rope_, arithmetic_of(trace, layer, threshold)) {}

std::vector<float> FullAttention::probabilities(std::uint32_t head, std::uint32_t first,
                                                std::uint32_t count) {
  const std::uint32_t tokens = tensors_.view.tokens;
  std::vector<float> p(std::size_t{count} * tokens);
  for (std::uint32_t done = 0; done < count;) {
    throw_if_cancelled();
    const std::uint32_t block = std::min(rows_.block_queries(), count - done);
    rows_.compute(first + done, block);
    for (std::uint32_t i = done; i < done + block; ++i) {
      const SharedRows::Row row = rows_.row(first + i, head);
      std::transform(row.e.begin(), row.e.end(), p.begin() + std::ptrdiff_t{i} * tokens,
                     [&](float e) { return e / row.sum; });
    }
    done += block;
  }
  return p;
}

std::vector<float> FullAttention::mean_row(std::uint32_t query) {
  const std::uint32_t group = tensors_.view.group;
  std::vector<float> mean(query + std::size_t{1});
  rows_.compute(query, 1);
  for (std::uint32_t head = 0; head < group; ++head) {
    const SharedRows::Row row = rows_.row(query, head);
    for (std::uint32_t j = 0; j <= query; ++j)
      mean[j] += row.e[j] / row.sum / static_cast<float>(group);
  }
  return mean;
}

FullAttention::Accesses FullAttention::accesses(AccessRule rule,
                                                const std::vector<std::uint32_t>& queries) {
  Accesses found;
  std::vector<std::uint8_t> requested;
  for (const std::uint32_t query : queries) {
    throw_if_cancelled();
    rows_.compute(query, 1);
    requested.assign(query + std::size_t{1}, 0);
    if (rule.top_k)
      mark_most_probable(query, *rule.top_k, requested);
    else
      for (std::uint32_t head = 0; head < tensors_.view.group; ++head) {
        const auto flags = rows_.requests(query, head).flags;
        for (std::uint32_t j = 0; j < query; ++j) requested[j] |= flags[j];
      }
    for (std::uint32_t j = 0; j < query; ++j)
      if (requested[j]) found.queries.push_back(query), found.tokens.push_back(j);
  }
  return found;
}

/// Marks the `top_k` most probable tokens of each query head. Of two tokens with equal probability,
/// the older one comes first.
void FullAttention::mark_most_probable(std::uint32_t query, std::uint32_t top_k,
                                       std::vector<std::uint8_t>& requested) {
  std::vector<std::uint32_t> order(query + std::size_t{1});
  const auto selected = static_cast<std::ptrdiff_t>(std::min<std::size_t>(top_k, order.size()));
  for (std::uint32_t head = 0; head < tensors_.view.group; ++head) {
    const SharedRows::Row row = rows_.row(query, head);
    std::iota(order.begin(), order.end(), 0u);
    std::partial_sort(order.begin(), order.begin() + selected, order.end(),
                      [&](std::uint32_t a, std::uint32_t b) {
                        return row.e[a] != row.e[b] ? row.e[a] > row.e[b] : a < b;
                      });
    std::for_each(order.begin(), order.begin() + selected,
                  [&](std::uint32_t j) { requested[j] = 1; });
  }
}

}  // namespace kvlab
