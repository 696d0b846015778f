// The lane of policies whose ranks depend on what their own cache gave them: each configuration
// keeps its own states, and all read the shared exponentials of the tokens they keep.
#pragma once

#include <memory>

#include "sim/lanes/feedback/feedback_run.hpp"

namespace kvlab {

class FeedbackLane final : public Lane {
 public:
  /// `configs`: any policies, all at original positions or all squeezed; neighbours should keep
  /// similar sets. `span` may be null: nothing is measured. `places`: for squeezed positions, which
  /// need rows of unrounded logits too; else null. `unrounded`: these, for the lane to compute;
  /// null: the full cache's are not rounded either. `coded`: for ladders.
  FeedbackLane(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
               const QuerySpan* span, std::unique_ptr<PlaceTable> places = nullptr,
               std::unique_ptr<GroupRows> unrounded = nullptr,
               std::unique_ptr<RungRows> coded = nullptr);
  ~FeedbackLane() override;

  bool wants_row(std::uint32_t query) const override;
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(LaneWatcher watcher) override { watcher_ = std::move(watcher); }

  /// attend() of the lanes of a layer's KV heads, query by query, so that their caches may evict
  /// together. `rows` by KV head.
  static void attend_together(std::span<const std::unique_ptr<FeedbackLane>> heads,
                              std::uint32_t first, std::uint32_t count, std::span<GroupRows> rows);
  /// A configuration's cache: for share_ranks().
  AgedSet& aged(std::size_t config) { return runs_[config]->aged(); }

 private:
  void prepare(std::uint32_t first, std::uint32_t count);
  void step(std::size_t config, std::uint32_t query, GroupRows& rows);

  const QuerySpan* span_;
  std::unique_ptr<GroupRows> unrounded_;
  std::unique_ptr<PlaceTable> places_;
  std::unique_ptr<RungRows> coded_;
  std::vector<std::unique_ptr<FeedbackRun>> runs_;
  GatherRoom room_;
  LaneWatcher watcher_;
  bool observes_ = false;
};

}  // namespace kvlab
