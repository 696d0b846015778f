#include "sim/lanes/head_lanes.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "sim/lanes/feedback/feedback_lane.hpp"
#include "sim/lanes/nested/nested_lane.hpp"
#include "sim/lanes/nested/topk_lane.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

enum class Kind { nested, feedback, squeezed, topk };

Kind kind_of(const CacheConfig& config) {
  if (config.policy.name == kOracleTopk) return Kind::topk;
  if (config.policy.name == kOracleMass) return Kind::nested;
  if (config.positions == Positions::cache) return Kind::squeezed;
  const PolicyInfo& info = config.policy.entry->info;
  // Under modifiers and ladders sets of budgets differ.
  if (config.policy.modifiers != Modifiers{} || !config.policy.ladder.is_plain())
    return Kind::feedback;
  return info.order == Order::nested && info.needs == Needs::nothing ? Kind::nested
                                                                     : Kind::feedback;
}

/// What configurations of one nested lane have in common; of the feedback lane, what makes
/// neighbours alike.
using Family =
    std::tuple<Kind, std::string, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t>;

Family family_of(const ResolvedConfig& c) {
  const Kind kind = kind_of(c);
  if (kind != Kind::nested) return {kind, "", 0, 0, 0, 0};
  return {kind, c.policy.text(), c.seed, c.prefill.chunk, c.guards.sinks, c.guards.recent};
}

std::string chain_order(const ResolvedConfig& c) {
  return c.prefill.text() + " " + c.policy.text();
}

}  // namespace

std::unique_ptr<FeedbackLane> squeezed_lane(LaneConfigs configs, AgedSet::Identity identity,
                                            const HeadView& view, const RopeTable& rope,
                                            const HeadArithmetic& arithmetic,
                                            const QuerySpan* span) {
  HeadArithmetic exact = arithmetic;
  exact.rounding.reset();
  return std::make_unique<FeedbackLane>(
      std::move(configs), identity, view, span,
      std::make_unique<PlaceTable>(rope, rope.cosines(0).size()),
      arithmetic.rounding ? std::make_unique<GroupRows>(view, rope, exact) : nullptr);
}

std::unique_ptr<FeedbackLane> feedback_lane(LaneConfigs configs, AgedSet::Identity identity,
                                            const HeadView& view, const RopeTable& rope,
                                            const HeadArithmetic& arithmetic,
                                            const QuerySpan* span) {
  const bool coded = std::ranges::any_of(
      configs, [](const ResolvedConfig* config) { return config->policy.ladder.is_coded(); });
  return std::make_unique<FeedbackLane>(
      std::move(configs), identity, view, span, nullptr, nullptr,
      coded ? std::make_unique<RungRows>(view, rope, arithmetic) : nullptr);
}

HeadLanes::HeadLanes(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
                     const RopeTable& rope, const HeadArithmetic& arithmetic, const QuerySpan* span)
    : count_(configs.size()), view_(view), rows_(view, rope, arithmetic) {
  plan(configs, identity, rope, arithmetic, span);
}

void HeadLanes::plan(const LaneConfigs& configs, LiveSet::Identity identity, const RopeTable& rope,
                     const HeadArithmetic& arithmetic, const QuerySpan* span) {
  std::map<Family, std::vector<std::size_t>> families;
  for (std::size_t c = 0; c < configs.size(); ++c) families[family_of(*configs[c])].push_back(c);
  for (auto& [family, indices] : families) {
    std::stable_sort(indices.begin(), indices.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(chain_order(*configs[a]), configs[a]->budget_tokens) <
             std::pair(chain_order(*configs[b]), configs[b]->budget_tokens);
    });
    LaneConfigs own;
    for (const std::size_t c : indices) own.push_back(configs[c]);
    switch (std::get<Kind>(family)) {
      case Kind::topk:
        if (span) add(std::make_unique<TopkLane>(std::move(own), view_.group, *span), indices);
        break;
      case Kind::nested: {
        auto order = own.front()->policy.entry ? nested_order(*own.back(), identity, view_)
                                               : future_order(future_masses());
        add(std::make_unique<NestedLane>(std::move(own), std::move(order), view_, span), indices);
        break;
      }
      case Kind::feedback:
        add(feedback_lane(std::move(own), identity, view_, rope, arithmetic, span), indices);
        break;
      case Kind::squeezed:
        add(squeezed_lane(std::move(own), identity, view_, rope, arithmetic, span), indices);
        break;
    }
  }
}

void HeadLanes::add(std::unique_ptr<Lane> lane, std::vector<std::size_t> indices) {
  lanes_.push_back(std::move(lane));
  indices_.push_back(std::move(indices));
}

/// One more pass over the full cache: what every token gets from all queries.
std::vector<std::uint64_t> HeadLanes::future_masses() {
  std::vector<std::uint64_t> masses(whole_blocks(view_.tokens));
  for (std::uint32_t first = 0; first < view_.tokens; first += rows_.block_queries()) {
    const std::uint32_t count = std::min(rows_.block_queries(), view_.tokens - first);
    throw_if_cancelled();
    rows_.compute(first, count);
    for (std::uint32_t query = first; query < first + count; ++query)
      rows_.add_masses(query, masses.data());
  }
  return masses;
}

void HeadLanes::watch(LaneWatcher watcher) {
  for (std::size_t l = 0; l < lanes_.size(); ++l)
    lanes_[l]->watch([watcher, this, l](std::size_t c, std::uint32_t query, auto live) {
      watcher(indices_[l][c], query, live);
    });
}

void HeadLanes::run() {
  for (std::uint32_t first = 0; first < view_.tokens; first += rows_.block_queries()) {
    const std::uint32_t count = std::min(rows_.block_queries(), view_.tokens - first);
    throw_if_cancelled();
    const bool wanted = std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
      for (std::uint32_t query = first; query < first + count; ++query)
        if (lane->wants_row(query)) return true;
      return false;
    });
    if (wanted) rows_.compute(first, count);
    for (const auto& lane : lanes_) lane->attend(first, count, rows_);
  }
}

std::vector<HeadOutcome> HeadLanes::outcomes() {
  std::vector<HeadOutcome> all(count_);
  for (std::size_t l = 0; l < lanes_.size(); ++l) {
    std::vector<HeadOutcome> own = lanes_[l]->outcomes();
    for (std::size_t i = 0; i < own.size(); ++i) all[indices_[l][i]] = std::move(own[i]);
  }
  return all;
}

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
