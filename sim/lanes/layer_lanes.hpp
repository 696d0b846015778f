// The KV heads of one layer, query by query, through the configurations whose caches evict together
// (scope=layer).
#pragma once

#include <functional>
#include <memory>

#include "sim/lanes/feedback/feedback_lane.hpp"

namespace kvlab {

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
