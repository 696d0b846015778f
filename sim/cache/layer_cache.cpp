#include "sim/cache/layer_cache.hpp"

#include <algorithm>
#include <vector>

#include "traces/base/parallel.hpp"

namespace kvlab {

bool any_chunk(const ResolvedConfig& config) {
  return !config.evicts() && config.policy.entry->info.needs == Needs::nothing &&
         !config.policy.tier_plan.is_quantized();
}

LayerCache::LayerCache(const ResolvedConfig& config, const HeadShape& shape, std::uint32_t kv_heads,
                       std::uint32_t layer, const OutputProjections* output)
    : shape_(shape),
      evicts_together_(config.evicts_by_layer()),
      identity_(config.identity(layer, 0)) {
  if (config.policy.entry && config.policy.entry->see_rows) looker_ = config.policy.entry;
  for (std::uint32_t head = 0; head < kv_heads; ++head) {
    HeadShape own = shape_;
    if (!shape.sinks.empty())
      own.sinks.assign(&shape.sinks[head * shape.group],
                       &shape.sinks[head * shape.group] + shape.group);
    FeaturesByName feature_values;
    config.add_supplied_features(layer, head, feature_values);
    heads_.emplace_back(own, config.live_set(layer, head), weights_of(output, layer, head),
                        std::move(feature_values));
  }
  for (const HostCache& head : heads_) observes_ |= head.live().needs() != Needs::nothing;
  share_ranks_of_heads();
}

LayerCache::LayerCache(const LayerCache& other)
    : shape_(other.shape_),
      observes_(other.observes_),
      evicts_together_(other.evicts_together_),
      tokens_(other.tokens_),
      identity_(other.identity_),
      looker_(other.looker_),
      heads_(other.heads_) {
  share_ranks_of_heads();
}

/// Connects the heads: with scope=layer they evict by ranks that are computed for the whole layer,
/// and with ada() they share slots. Otherwise this has no effect.
void LayerCache::share_ranks_of_heads() {
  std::vector<AgedSet*> together;
  for (HostCache& head : heads_) together.push_back(&head.aged_set());
  share_ranks(together);
}

/// If the heads evict together, evicts from all heads before any head appends. If the policy reads
/// rows (looker_), evicts from all heads before the policy sees the rows of the next append.
void LayerCache::evict_together(std::uint32_t now) {
  if (!evicts_together_ && !looker_) return;
  for (HostCache& head : heads_) head.evict_to_budget(now);
}

void LayerCache::step(const LayerRows& rows, const RopeTable& rope, unsigned threads) {
  const std::size_t heads = heads_.size();
  const std::uint32_t n = rows.tokens;
  evict_together(rows.first);
  tokens_ = rows.first + n;
  if (looker_ && n > 1) show(rows, rope.rope());
  parallel_for(heads, threads,
               [&](std::size_t h) { heads_[h].begin_step(head_append(rows, h), rope); });
  const bool attends = rows.out || observes_;
  const std::uint32_t blocks = attends ? (n + kQueryBlock - 1) / kQueryBlock : 0;
  parallel_for(heads * blocks, threads, [&](std::size_t item) {
    const std::size_t head = item % heads;
    const auto begin = static_cast<std::uint32_t>(item / heads) * kQueryBlock;
    heads_[head].attend(head_append(rows, head), begin, std::min(n, begin + kQueryBlock), rope);
  });
  for (HostCache& head : heads_) head.end_step();
}

void LayerCache::attend_draft(const LayerRows& rows, std::span<const DraftPath> paths,
                              const RopeTable& rope, unsigned threads) {
  evict_together(rows.first);
  parallel_for(heads_.size(), threads, [&](std::size_t head) {
    heads_[head].attend_draft(head_append(rows, head), paths, rope);
  });
}

void LayerCache::drop_drafts() {
  for (HostCache& head : heads_) head.drop_drafts();
}

void LayerCache::show(const LayerRows& rows, const Rope& rope) const {
  const auto heads = static_cast<std::uint32_t>(heads_.size());
  looker_->see_rows({identity_.sequence, identity_.layer, rows.first, rows.tokens,
                     heads * shape_.group, heads, shape_.head_size, rows.q, rows.k, rows.v,
                     rope.inv_freq, rope.factor, shape_.softmax_scale});
}

void LayerCache::end_prompt() {
  for (HostCache& head : heads_) head.end_prompt();
  // If the policy reads rows, evicts now and not before the next append, so that the policy need
  // not store these rows. The result is the same, because eviction does not depend on the tokens
  // that follow.
  for (HostCache& head : heads_)
    if (looker_) head.evict_to_budget(tokens_);
}

HeadAppend LayerCache::head_append(const LayerRows& rows, std::size_t head) const {
  const std::size_t heads = heads_.size(), group = shape_.group, dim = shape_.head_size;
  return {.first = rows.first,
          .tokens = rows.tokens,
          .q = rows.q + head * group * dim,
          .query_head_stride = dim,
          .query_stride = heads * group * dim,
          .k = rows.k + head * dim,
          .v = rows.v + head * dim,
          .key_stride = heads * dim,
          .out = rows.out ? rows.out + head * group * dim : nullptr,
          .lse = rows.lse ? rows.lse + head * group : nullptr,
          .lse_stride = heads * group};
}

}  // namespace kvlab
