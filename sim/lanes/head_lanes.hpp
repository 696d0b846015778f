// Which lane a configuration takes, and one KV head through all lanes.
#pragma once

#include <memory>

#include "sim/lanes/feedback/feedback_lane.hpp"

namespace kvlab {

/// The lane of configurations at original positions.
std::unique_ptr<FeedbackLane> feedback_lane(LaneConfigs configs, AgedSet::Identity identity,
                                            const HeadView& view, const RopeTable& rope,
                                            const HeadArithmetic& arithmetic,
                                            const QuerySpan* span);

/// The lane of configurations at squeezed positions.
std::unique_ptr<FeedbackLane> squeezed_lane(LaneConfigs configs, AgedSet::Identity identity,
                                            const HeadView& view, const RopeTable& rope,
                                            const HeadArithmetic& arithmetic,
                                            const QuerySpan* span);

/// Takes one KV head through `configs`.
class HeadLanes {
 public:
  /// All must outlive this. `span` may be null: nothing is measured.
  HeadLanes(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
            const RopeTable& rope, const HeadArithmetic& arithmetic, const QuerySpan* span);

  /// Called with a configuration's index; not for oracle_topk.
  void watch(LaneWatcher watcher);
  void run();
  /// By configuration; once, after run().
  std::vector<HeadOutcome> outcomes();

 private:
  void plan(const LaneConfigs& configs, LiveSet::Identity identity, const RopeTable& rope,
            const HeadArithmetic& arithmetic, const QuerySpan* span);
  void add(std::unique_ptr<Lane> lane, std::vector<std::size_t> indices);
  std::vector<std::uint64_t> future_masses();

  std::size_t count_;
  HeadView view_;
  GroupRows rows_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::vector<std::size_t>> indices_;  // by lane: its configurations
};

// The KV heads of one layer, query by query, through the configurations whose caches evict together
// (scope=layer).

class LayerLanes {
 public:
  /// All must outlive this. `views` by KV head. `span` may be null: nothing is measured.
  LayerLanes(const LaneConfigs& configs, AgedSet::Identity layer, std::span<const HeadView> views,
             const RopeTable& rope, const HeadArithmetic& arithmetic, const QuerySpan* span);

  /// Called for one KV head with a configuration's index, a query and what was live.
  void watch(std::uint32_t kv_head, const LaneWatcher& watcher);
  void run();
  /// By KV head, then configuration; once, after run().
  std::vector<std::vector<HeadOutcome>> outcomes();

 private:
  /// Configurations of one kind of positions: a lane for each KV head.
  struct Kind {
    std::vector<std::size_t> indices;
    std::vector<std::unique_ptr<FeedbackLane>> heads;
  };
  void add(const LaneConfigs& configs, Positions positions, AgedSet::Identity layer,
           const RopeTable& rope, const HeadArithmetic& arithmetic, const QuerySpan* span);

  std::size_t count_;
  std::span<const HeadView> views_;
  std::vector<GroupRows> rows_;  // by KV head
  std::vector<Kind> kinds_;
};

}  // namespace kvlab
