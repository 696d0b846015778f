#include "sim/access/full_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "policies/observation.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

HeadArithmetic arithmetic_of(const TraceReader& trace, double threshold) {
  if (!(threshold >= 0 && threshold <= 1))
    throw std::invalid_argument(
        fmt::format("request threshold {}: should be between 0 and 1", threshold));
  return {.softmax_scale = trace.header().softmax_scale,
          .rounding = trace.header().rounding == Rounding::model_dtype
                          ? std::optional(trace.shape().dtype)
                          : std::nullopt,
          .threshold16 = request_threshold16(threshold)};
}

}  // namespace

FullAttention::FullAttention(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                             double threshold)
    : rope_(trace.header().rope, trace.tokens()),
      tokens_(trace.tokens()),
      group_(trace.shape().group()),
      rows_(view_of(trace, layer, kv_head), rope_, arithmetic_of(trace, threshold)) {}

HeadView FullAttention::view_of(const TraceReader& trace, std::uint32_t layer,
                                std::uint32_t kv_head) {
  const ModelShape& shape = trace.shape();
  if (layer >= shape.layers || kv_head >= shape.kv_heads)
    throw std::invalid_argument(
        fmt::format("layer {}, KV head {}: the trace {} has {} layers of {} KV heads", layer,
                    kv_head, trace.directory().string(), shape.layers, shape.kv_heads));
  const std::size_t floats = std::size_t{tokens_} * shape.head_size;
  q_.resize(group_ * floats), k_.resize(floats), v_.resize(floats);
  for (std::uint32_t g = 0; g < group_; ++g)
    trace.read(Part::q, layer, kv_head * group_ + g, 0, tokens_, q_.data() + g * floats);
  trace.read(Part::k, layer, kv_head, 0, tokens_, k_.data());
  trace.read(Part::v, layer, kv_head, 0, tokens_, v_.data());
  return {.tokens = tokens_,
          .group = group_,
          .head_size = shape.head_size,
          .q = q_.data(),
          .q_head_stride = floats,
          .q_token_stride = shape.head_size,
          .k = k_.data(),
          .v = v_.data(),
          .kv_token_stride = shape.head_size};
}

std::vector<float> FullAttention::probabilities(std::uint32_t head, std::uint32_t first,
                                                std::uint32_t count) {
  std::vector<float> p(std::size_t{count} * tokens_);
  for (std::uint32_t done = 0; done < count;) {
    throw_if_cancelled();
    const std::uint32_t block = std::min(rows_.block_queries(), count - done);
    rows_.compute(first + done, block);
    for (std::uint32_t i = done; i < done + block; ++i) {
      const SharedRows::Row row = rows_.row(first + i, head);
      std::transform(row.e.begin(), row.e.end(), p.begin() + std::ptrdiff_t{i} * tokens_,
                     [&](float e) { return e / row.sum; });
    }
    done += block;
  }
  return p;
}

FullAttention::Accesses FullAttention::accesses(AccessRule rule,
                                                const std::vector<std::uint32_t>& queries) {
  Accesses found;
  std::vector<std::uint8_t> asked;
  for (const std::uint32_t query : queries) {
    throw_if_cancelled();
    rows_.compute(query, 1);
    asked.assign(query + std::size_t{1}, 0);
    if (rule.top_k)
      mark_most_probable(query, *rule.top_k, asked);
    else
      for (std::uint32_t head = 0; head < group_; ++head) {
        const auto flags = rows_.requests(query, head).flags;
        for (std::uint32_t j = 0; j < query; ++j) asked[j] |= flags[j];
      }
    for (std::uint32_t j = 0; j < query; ++j)
      if (asked[j]) found.queries.push_back(query), found.tokens.push_back(j);
  }
  return found;
}

/// At equal probability the older is asked for.
void FullAttention::mark_most_probable(std::uint32_t query, std::uint32_t top_k,
                                       std::vector<std::uint8_t>& asked) {
  std::vector<std::uint32_t> order(query + std::size_t{1});
  const auto most = static_cast<std::ptrdiff_t>(std::min<std::size_t>(top_k, order.size()));
  for (std::uint32_t head = 0; head < group_; ++head) {
    const SharedRows::Row row = rows_.row(query, head);
    std::iota(order.begin(), order.end(), 0u);
    std::partial_sort(order.begin(), order.begin() + most, order.end(),
                      [&](std::uint32_t a, std::uint32_t b) {
                        return row.e[a] != row.e[b] ? row.e[a] > row.e[b] : a < b;
                      });
    std::for_each(order.begin(), order.begin() + most, [&](std::uint32_t j) { asked[j] = 1; });
  }
}

}  // namespace kvlab
