#include "sim/lanes/layer_lanes.hpp"

#include <algorithm>

#include "sim/lanes/head_lanes.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {

LayerLanes::LayerLanes(const LaneConfigs& configs, AgedSet::Identity layer,
                       std::span<const HeadView> views, const RopeTable& rope,
                       const HeadArithmetic& arithmetic, const QuerySpan* span)
    : count_(configs.size()), views_(views) {
  for (const HeadView& view : views) rows_.emplace_back(view, rope, arithmetic);
  for (const Positions positions : {Positions::original, Positions::cache})
    add(configs, positions, layer, rope, arithmetic, span);
}

void LayerLanes::add(const LaneConfigs& configs, Positions positions, AgedSet::Identity layer,
                     const RopeTable& rope, const HeadArithmetic& arithmetic,
                     const QuerySpan* span) {
  Kind kind;
  LaneConfigs own;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    if (configs[c]->positions != positions) continue;
    kind.indices.push_back(c);
    own.push_back(configs[c]);
  }
  if (own.empty()) return;
  std::vector<std::vector<AgedSet*>> together(own.size());
  for (std::size_t h = 0; h < views_.size(); ++h) {
    layer.kv_head = static_cast<std::uint32_t>(h);
    kind.heads.push_back(positions == Positions::original
                             ? feedback_lane(own, layer, views_[h], rope, arithmetic, span)
                             : squeezed_lane(own, layer, views_[h], rope, arithmetic, span));
    for (std::size_t c = 0; c < own.size(); ++c) together[c].push_back(&kind.heads[h]->aged(c));
  }
  for (const auto& caches : together) share_ranks(caches);
  kinds_.push_back(std::move(kind));
}

void LayerLanes::watch(std::uint32_t kv_head, const LaneWatcher& watcher) {
  for (Kind& kind : kinds_)
    kind.heads[kv_head]->watch(
        [watcher, indices = kind.indices](std::size_t c, std::uint32_t query, auto live) {
          watcher(indices[c], query, live);
        });
}

void LayerLanes::run() {
  const std::uint32_t tokens = views_.front().tokens, block = rows_.front().block_queries();
  for (std::uint32_t first = 0; first < tokens; first += block) {
    const std::uint32_t count = std::min(block, tokens - first);
    throw_if_cancelled();
    const bool wanted = std::ranges::any_of(kinds_, [&](const Kind& kind) {
      for (std::uint32_t query = first; query < first + count; ++query)
        if (kind.heads.front()->wants_row(query)) return true;
      return false;
    });
    if (wanted)
      for (GroupRows& rows : rows_) rows.compute(first, count);
    for (const Kind& kind : kinds_) FeedbackLane::attend_together(kind.heads, first, count, rows_);
  }
}

std::vector<std::vector<HeadOutcome>> LayerLanes::outcomes() {
  std::vector<std::vector<HeadOutcome>> all(views_.size());
  for (std::size_t h = 0; h < all.size(); ++h) {
    all[h].resize(count_);
    for (Kind& kind : kinds_) {
      std::vector<HeadOutcome> own = kind.heads[h]->outcomes();
      for (std::size_t i = 0; i < own.size(); ++i) all[h][kind.indices[i]] = std::move(own[i]);
    }
  }
  return all;
}

}  // namespace kvlab
