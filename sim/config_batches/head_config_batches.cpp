#include "sim/config_batches/head_config_batches.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "sim/config_batches/feedback/feedback_config_batch.hpp"
#include "sim/config_batches/topk_config_batch.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

enum class Kind { original_positions, cache_positions, topk };

Kind kind_of(const CacheConfig& config) {
  if (config.policy.name == kOracleTopk) return Kind::topk;
  return config.positions == Positions::cache ? Kind::cache_positions : Kind::original_positions;
}

bool knows_future(const ResolvedConfig* config) { return config->policy.name == kOracleAttention; }

std::string chain_order(const ResolvedConfig& c) {
  return c.prefill.text() + " " + c.policy.text();
}

}  // namespace

std::unique_ptr<FeedbackConfigBatch> make_cache_position_config_batch(
    BatchedConfigs configs, AgedSet::Identity identity, const HeadView& view, const RopeTable& rope,
    const HeadArithmetic& arithmetic, const MeasuredQueries* measured) {
  HeadArithmetic exact = arithmetic;
  exact.rounding.reset();
  return std::make_unique<FeedbackConfigBatch>(
      std::move(configs), identity, view, measured,
      std::make_unique<CachePositionTable>(rope, rope.cosines(0).size()),
      arithmetic.rounding ? std::make_unique<GroupRows>(view, rope, exact) : nullptr);
}

std::unique_ptr<FeedbackConfigBatch> make_feedback_config_batch(
    BatchedConfigs configs, AgedSet::Identity identity, const HeadView& view, const RopeTable& rope,
    const HeadArithmetic& arithmetic, const MeasuredQueries* measured,
    std::unique_ptr<FutureMasses> oracle) {
  const bool quantized = std::ranges::any_of(configs, [](const ResolvedConfig* config) {
    return config->policy.tier_plan.is_quantized();
  });
  return std::make_unique<FeedbackConfigBatch>(
      std::move(configs), identity, view, measured, nullptr, nullptr,
      quantized ? std::make_unique<TierRows>(view, rope, arithmetic) : nullptr, std::move(oracle));
}

HeadConfigBatches::HeadConfigBatches(BatchedConfigs configs, LiveSet::Identity identity,
                                     const HeadView& view, const RopeTable& rope,
                                     const HeadArithmetic& arithmetic,
                                     const MeasuredQueries* measured)
    : count_(configs.size()), view_(view), rows_(view, rope, arithmetic) {
  plan(configs, identity, rope, arithmetic, measured);
}

void HeadConfigBatches::plan(const BatchedConfigs& configs, LiveSet::Identity identity,
                             const RopeTable& rope, const HeadArithmetic& arithmetic,
                             const MeasuredQueries* measured) {
  std::map<Kind, std::vector<std::size_t>> kinds;
  for (std::size_t c = 0; c < configs.size(); ++c) kinds[kind_of(*configs[c])].push_back(c);
  for (auto& [kind, indices] : kinds) {
    std::stable_sort(indices.begin(), indices.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(chain_order(*configs[a]), configs[a]->budget_tokens) <
             std::pair(chain_order(*configs[b]), configs[b]->budget_tokens);
    });
    BatchedConfigs own;
    for (const std::size_t c : indices) own.push_back(configs[c]);
    switch (kind) {
      case Kind::topk:
        if (measured)
          add(std::make_unique<TopkConfigBatch>(std::move(own), view_.group, *measured), indices);
        break;
      case Kind::original_positions: {
        auto oracle = std::ranges::any_of(own, knows_future) ? std::make_unique<FutureMasses>(rows_)
                                                             : nullptr;
        add(make_feedback_config_batch(std::move(own), identity, view_, rope, arithmetic, measured,
                                       std::move(oracle)),
            indices);
        break;
      }
      case Kind::cache_positions:
        add(make_cache_position_config_batch(std::move(own), identity, view_, rope, arithmetic,
                                             measured),
            indices);
        break;
    }
  }
}

void HeadConfigBatches::add(std::unique_ptr<ConfigBatch> config_batch,
                            std::vector<std::size_t> indices) {
  config_batches_.push_back(std::move(config_batch));
  indices_.push_back(std::move(indices));
}

void HeadConfigBatches::watch(ConfigBatchWatcher watcher) {
  for (std::size_t l = 0; l < config_batches_.size(); ++l)
    config_batches_[l]->watch([watcher, this, l](std::size_t c, std::uint32_t query, auto live) {
      watcher(indices_[l][c], query, live);
    });
}

void HeadConfigBatches::run() {
  for (std::uint32_t first = 0; first < view_.tokens; first += rows_.block_queries()) {
    const std::uint32_t count = std::min(rows_.block_queries(), view_.tokens - first);
    throw_if_cancelled();
    const bool wanted =
        std::any_of(config_batches_.begin(), config_batches_.end(), [&](const auto& config_batch) {
          for (std::uint32_t query = first; query < first + count; ++query)
            if (config_batch->wants_row(query)) return true;
          return false;
        });
    if (wanted) rows_.compute(first, count);
    for (const auto& config_batch : config_batches_) config_batch->attend(first, count, rows_);
  }
}

std::vector<HeadOutcome> HeadConfigBatches::outcomes() {
  std::vector<HeadOutcome> all(count_);
  for (std::size_t l = 0; l < config_batches_.size(); ++l) {
    std::vector<HeadOutcome> own = config_batches_[l]->outcomes();
    for (std::size_t i = 0; i < own.size(); ++i) all[indices_[l][i]] = std::move(own[i]);
  }
  return all;
}

LayerConfigBatches::LayerConfigBatches(const BatchedConfigs& configs, AgedSet::Identity layer,
                                       std::span<const HeadView> views, const RopeTable& rope,
                                       const HeadArithmetic& arithmetic,
                                       const MeasuredQueries* measured)
    : count_(configs.size()), views_(views) {
  for (const HeadView& view : views) rows_.emplace_back(view, rope, arithmetic);
  for (const Positions positions : {Positions::original, Positions::cache})
    add(configs, positions, layer, rope, arithmetic, measured);
}

void LayerConfigBatches::add(const BatchedConfigs& configs, Positions positions,
                             AgedSet::Identity layer, const RopeTable& rope,
                             const HeadArithmetic& arithmetic, const MeasuredQueries* measured) {
  Kind kind;
  BatchedConfigs own;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    if (configs[c]->positions != positions) continue;
    kind.indices.push_back(c);
    own.push_back(configs[c]);
  }
  if (own.empty()) return;
  std::vector<std::vector<AgedSet*>> together(own.size());
  for (std::size_t h = 0; h < views_.size(); ++h) {
    layer.kv_head = static_cast<std::uint32_t>(h);
    kind.heads.push_back(
        positions == Positions::original
            ? make_feedback_config_batch(own, layer, views_[h], rope, arithmetic, measured)
            : make_cache_position_config_batch(own, layer, views_[h], rope, arithmetic, measured));
    for (std::size_t c = 0; c < own.size(); ++c) together[c].push_back(&kind.heads[h]->aged_set(c));
  }
  for (const auto& caches : together) share_ranks(caches);
  kinds_.push_back(std::move(kind));
}

void LayerConfigBatches::watch(std::uint32_t kv_head, const ConfigBatchWatcher& watcher) {
  for (Kind& kind : kinds_)
    kind.heads[kv_head]->watch(
        [watcher, indices = kind.indices](std::size_t c, std::uint32_t query, auto live) {
          watcher(indices[c], query, live);
        });
}

void LayerConfigBatches::run() {
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
    for (const Kind& kind : kinds_)
      FeedbackConfigBatch::attend_together(kind.heads, first, count, rows_);
  }
}

std::vector<std::vector<HeadOutcome>> LayerConfigBatches::outcomes() {
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
