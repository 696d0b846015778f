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
  /// null: the full cache's are not rounded either.
  FeedbackLane(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
               const QuerySpan* span, std::unique_ptr<PlaceTable> places = nullptr,
               std::unique_ptr<GroupRows> unrounded = nullptr);
  ~FeedbackLane() override;

  bool wants_row(std::uint32_t query) const override;
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(LaneWatcher watcher) override { watcher_ = std::move(watcher); }

 private:
  const QuerySpan* span_;
  std::unique_ptr<GroupRows> unrounded_;
  std::unique_ptr<PlaceTable> places_;
  std::vector<std::unique_ptr<FeedbackRun>> runs_;
  GatherRoom room_;
  LaneWatcher watcher_;
  bool observes_ = false;
};

}  // namespace kvlab
