// Assigns configurations to configuration batches, and runs one KV head through all of them.
#pragma once

#include <memory>

#include "sim/config_batches/feedback/feedback_config_batch.hpp"

namespace kvlab {

/// Makes the configuration batch for configurations at original positions. `oracle`: see
/// FeedbackConfigBatch.
std::unique_ptr<FeedbackConfigBatch> make_feedback_config_batch(
    BatchedConfigs configs, AgedSet::Identity identity, const HeadView& view, const RopeTable& rope,
    const HeadArithmetic& arithmetic, const MeasuredQueries* measured,
    std::unique_ptr<FutureMasses> oracle = nullptr);

/// Makes the configuration batch for configurations at cache positions.
std::unique_ptr<FeedbackConfigBatch> make_cache_position_config_batch(
    BatchedConfigs configs, AgedSet::Identity identity, const HeadView& view, const RopeTable& rope,
    const HeadArithmetic& arithmetic, const MeasuredQueries* measured);

/// Runs one KV head through `configs`.
class HeadConfigBatches {
 public:
  /// All arguments must outlive this object. If `measured` is null, nothing is measured.
  HeadConfigBatches(BatchedConfigs configs, LiveSet::Identity identity, const HeadView& view,
                    const RopeTable& rope, const HeadArithmetic& arithmetic,
                    const MeasuredQueries* measured);

  /// Sets the function that gets the live positions of each configuration. The function gets the
  /// index of the configuration in `configs`. It is not called for oracle_topk, which keeps a set
  /// of tokens for each query head and not for a KV head.
  void watch(ConfigBatchWatcher watcher);
  void run();
  /// The outcomes by configuration. Call once, after run().
  std::vector<HeadOutcome> outcomes();

 private:
  void plan(const BatchedConfigs& configs, LiveSet::Identity identity, const RopeTable& rope,
            const HeadArithmetic& arithmetic, const MeasuredQueries* measured);
  void add(std::unique_ptr<ConfigBatch> config_batch, std::vector<std::size_t> indices);

  std::size_t count_;
  HeadView view_;
  GroupRows rows_;
  std::vector<std::unique_ptr<ConfigBatch>> config_batches_;
  // [configuration batch]: indices of its configurations
  std::vector<std::vector<std::size_t>> indices_;
};

// Runs the KV heads of one layer, query by query, through the configurations whose caches evict
// together (scope=layer).

class LayerConfigBatches {
 public:
  /// All arguments must outlive this object. `views` has one view for each KV head. If `measured`
  /// is null, nothing is measured.
  LayerConfigBatches(const BatchedConfigs& configs, AgedSet::Identity layer,
                     std::span<const HeadView> views, const RopeTable& rope,
                     const HeadArithmetic& arithmetic, const MeasuredQueries* measured);

  /// Sets the function that gets the live positions of KV head `kv_head`, with the index of the
  /// configuration and the query.
  void watch(std::uint32_t kv_head, const ConfigBatchWatcher& watcher);
  void run();
  /// The outcomes by KV head, then by configuration. Call once, after run().
  std::vector<std::vector<HeadOutcome>> outcomes();

 private:
  /// The configurations that have the same kind of positions (original or cache). Each KV head has
  /// one configuration batch for them.
  struct Kind {
    std::vector<std::size_t> indices;
    std::vector<std::unique_ptr<FeedbackConfigBatch>> heads;
  };
  void add(const BatchedConfigs& configs, Positions positions, AgedSet::Identity layer,
           const RopeTable& rope, const HeadArithmetic& arithmetic,
           const MeasuredQueries* measured);

  std::size_t count_;
  std::span<const HeadView> views_;
  std::vector<GroupRows> rows_;  // by KV head
  std::vector<Kind> kinds_;
};

}  // namespace kvlab
