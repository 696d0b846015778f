// The lane of policies whose ranks depend on what their own cache gave them: each configuration
// keeps its own states, and all read the shared exponentials of the tokens they keep.
#pragma once

#include <memory>

#include "sim/lanes/feedback/feedback_run.hpp"
#include "sim/lanes/output_chain.hpp"

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
  bool takes_outputs() const override { return true; }
  void list_outputs(const SampledRows& rows, std::vector<ValueJob>& jobs) override;
  void finish_outputs(const SampledRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(LaneWatcher watcher) override { watcher_ = std::move(watcher); }

 private:
  void list_own(const SampledRows& rows, FeedbackRun::Sample& sample,
                std::vector<ValueJob>& jobs) const;
  void list_tails(const SampledRows& rows, std::vector<ValueJob>& jobs);
  void measure_outputs(const SampledRows& rows, std::size_t i, FeedbackRun& run,
                       const float* shared);

  const QuerySpan* span_;
  std::uint32_t group_;
  std::unique_ptr<GroupRows> unrounded_;
  std::unique_ptr<PlaceTable> places_;
  std::vector<std::unique_ptr<FeedbackRun>> runs_;
  GatherRoom room_;
  std::vector<OutputChain> chains_;        // by sampled query
  SampledRows unrounded_samples_;          // of sampled queries, where there are unrounded rows
  std::vector<std::vector<float>> tails_;  // by sampled query: [range of tokens][heads][dim]
  LaneWatcher watcher_;
  bool observes_ = false;
};

}  // namespace kvlab
