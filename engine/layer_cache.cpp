#include "engine/layer_cache.hpp"

#include <algorithm>
#include <vector>

#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kQueryBlock = 32;  // queries that attend together
constexpr std::uint32_t kFirstPositions = 1024;

}  // namespace

LayerCache::LayerCache(const ResolvedConfig& config, const HeadShape& shape, std::uint32_t kv_heads,
                       std::uint32_t layer, Rope rope)
    : config_(config), shape_(shape), rope_(std::move(rope)) {
  for (std::uint32_t head = 0; head < kv_heads; ++head)
    heads_.emplace_back(shape_, config_.live_set(layer, head));
  if (!config_.evicts_by_layer()) return;
  std::vector<AgedSet*> together;
  for (HeadCache& head : heads_) together.push_back(&head.aged());
  share_ranks(together);
}

void LayerCache::attend(const LayerTokens& rows, unsigned threads) {
  const std::uint32_t whole = config_.prefill.chunk == 0 ? rows.tokens : config_.prefill.chunk;
  const std::uint32_t most = rows.is_prompt ? whole : 1;
  for (std::uint32_t first = 0; first < rows.tokens; first += most)
    admit(rows, first, std::min(most, rows.tokens - first), threads);
  if (!rows.is_prompt) return;
  for (HeadCache& head : heads_) head.end_prompt();
}

void LayerCache::admit(const LayerTokens& rows, std::uint32_t first, std::uint32_t count,
                       unsigned threads) {
  if (!table_ || table_->positions() < tokens_ + count)
    table_.emplace(
        rope_, std::max({tokens_ + count, kFirstPositions, table_ ? 2 * table_->positions() : 0}));
  const std::size_t heads = heads_.size(), group = shape_.group, dim = shape_.head_size;
  std::vector<float> lse(count * heads * group);
  const auto admission = [&](std::size_t head) {
    const std::size_t query = first * heads * group * dim + head * group * dim,
                      key = (first * heads + head) * dim;
    return HeadAdmission{.first = tokens_,
                         .tokens = count,
                         .q = rows.q + query,
                         .out = rows.out + query,
                         .query_stride = heads * group * dim,
                         .k = rows.k + key,
                         .v = rows.v + key,
                         .key_stride = heads * dim,
                         .lse = lse.data() + head * group,
                         .lse_stride = heads * group};
  };
  for (HeadCache& head : heads_) head.make_room(tokens_);
  parallel_for(heads, threads, [&](std::size_t h) { heads_[h].admit(admission(h), *table_); });
  const std::uint32_t blocks = (count + kQueryBlock - 1) / kQueryBlock;
  parallel_for(heads * blocks, threads, [&](std::size_t item) {
    const auto begin = static_cast<std::uint32_t>(item / heads) * kQueryBlock;
    heads_[item % heads].attend(admission(item % heads), begin,
                                std::min(count, begin + kQueryBlock), *table_);
  });
  for (HeadCache& head : heads_) head.observe();
  tokens_ += count;
}

}  // namespace kvlab
