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
  /// `configs`: any policies, all at original positions or all at cache positions. Neighbours in
  /// `configs` should keep similar sets of tokens, because the sums of values of one configuration
  /// are computed from those of the configuration before it. If `measured` is null, nothing is
  /// measured. `positions_in_cache`: null at original positions. `unrounded`: rows of unrounded
  /// logits, for cache positions; the configuration batch computes these rows itself. `unrounded`
  /// is null if the logits of the full cache's rows are not rounded: then cache positions use the
  /// full cache's rows. `quantized`: the rows of quantized tiers, for configurations with tier
  /// plans; may be null. `oracle`: for `oracle_attention`; may be null.
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

  /// Does what attend() does, for the configuration batches of all KV heads of a layer. Every head
  /// processes a query before any head processes the next query, so that the caches of the heads
  /// can evict together. `rows` has one element for each KV head.
  static void attend_together(std::span<const std::unique_ptr<FeedbackConfigBatch>> heads,
                              std::uint32_t first, std::uint32_t count, std::span<GroupRows> rows);
  /// The cache of a configuration, which share_ranks() needs.
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
