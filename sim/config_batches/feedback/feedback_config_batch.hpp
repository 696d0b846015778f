// The configuration batch that supports every policy. Each configuration has separate policy
// states, because what a policy observes depends on the tokens that its cache has kept so far. All
// configurations read the same exponentials.
#pragma once

#include <memory>

#include "sim/config_batches/feedback/feedback_run.hpp"
#include "sim/config_batches/future_masses.hpp"

namespace kvlab {

class FeedbackConfigBatch final : public ConfigBatch {
 public:
  /// `configs`: any policies, all at original positions or all at cache positions. Configurations
  /// next to each other should keep similar sets of tokens, because their sums of values are
  /// computed from each other. If `measured` is null, nothing is measured. `positions_in_cache`:
  /// null at original positions. `unrounded`: the rows of unrounded logits that cache positions
  /// need; the configuration batch computes them. It is null if the full cache's rows are not
  /// rounded, because then those rows are used. `quantized`: the rows of quantized tiers, for
  /// configurations with tier plans; may be null. `oracle`: for `oracle_attention`; may be null.
  FeedbackConfigBatch(BatchedConfigs configs, LiveSet::Identity identity, const HeadView& view,
                      const MeasuredQueries* measured,
                      std::unique_ptr<CachePositionTable> positions_in_cache = nullptr,
                      std::unique_ptr<GroupRows> unrounded = nullptr,
                      std::unique_ptr<TierRows> quantized = nullptr,
                      std::unique_ptr<FutureMasses> oracle = nullptr);
  ~FeedbackConfigBatch() override;

  bool wants_row(std::uint32_t query) const override;
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(ConfigBatchWatcher watcher) override { watcher_ = std::move(watcher); }

  /// Does what attend() does, for the configuration batches of all KV heads of a layer. It takes
  /// one query after another through all heads, so that their caches may evict together. `rows` by
  /// KV head.
  static void attend_together(std::span<const std::unique_ptr<FeedbackConfigBatch>> heads,
                              std::uint32_t first, std::uint32_t count, std::span<GroupRows> rows);
  /// A configuration's cache: for share_ranks().
  AgedSet& aged_set(std::size_t config) { return runs_[config]->aged_set(); }

 private:
  void prepare(std::uint32_t first, std::uint32_t count);
  void step(std::size_t config, std::uint32_t query, GroupRows& rows);

  const MeasuredQueries* measured_;
  std::unique_ptr<GroupRows> unrounded_;
  std::unique_ptr<CachePositionTable> positions_in_cache_;
  std::unique_ptr<TierRows> quantized_;
  std::unique_ptr<FutureMasses> oracle_;
  std::vector<std::unique_ptr<FeedbackRun>> runs_;
  GatherScratch scratch_;
  ConfigBatchWatcher watcher_;
  bool observes_ = false;
};

}  // namespace kvlab
