#include "sim/lanes/feedback/feedback_lane.hpp"

#include <algorithm>

namespace kvlab {
FeedbackLane::FeedbackLane(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
                           const QuerySpan* span, std::unique_ptr<PlaceTable> places,
                           std::unique_ptr<GroupRows> unrounded, std::unique_ptr<RungRows> coded)
    : span_(span),
      unrounded_(std::move(unrounded)),
      places_(std::move(places)),
      coded_(std::move(coded)) {
  for (const ResolvedConfig* config : configs) {
    identity.seed = config->seed;
    runs_.push_back(std::make_unique<FeedbackRun>(*config, identity, view, span, coded_.get()));
    observes_ |= runs_.back()->cache().needs() != Needs::nothing;
  }
}

FeedbackLane::~FeedbackLane() = default;

bool FeedbackLane::wants_row(std::uint32_t query) const {
  return observes_ || (span_ && span_->contains(query));
}

/// The lane's own rows for the queries to come.
void FeedbackLane::prepare(std::uint32_t first, std::uint32_t count) {
  bool wanted = observes_;
  for (std::uint32_t query = first; query < first + count; ++query) wanted |= wants_row(query);
  if (unrounded_ && wanted) {
    std::uint32_t from = first;  // what no run shares yet is not looked at
    for (const auto& run : runs_) from = std::min(from, run->first_shared());
    unrounded_->compute(first, count, from);
  }
  if (coded_ && wanted) coded_->compute(first, count);
}

void FeedbackLane::step(std::size_t config, std::uint32_t query, GroupRows& rows) {
  runs_[config]->attend(query, rows, unrounded_ ? unrounded_.get() : &rows, places_.get(), room_);
  if (watcher_) watcher_(config, query, runs_[config]->visible());
}

void FeedbackLane::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  prepare(first, count);
  // A row stays near while all configurations take it; keys of one's own are more than a row.
  if (places_) {
    for (std::size_t c = 0; c < runs_.size(); ++c)
      for (std::uint32_t query = first; query < first + count; ++query) step(c, query, rows);
  } else {
    for (std::uint32_t query = first; query < first + count; ++query)
      for (std::size_t c = 0; c < runs_.size(); ++c) step(c, query, rows);
  }
}

void FeedbackLane::attend_together(std::span<const std::unique_ptr<FeedbackLane>> heads,
                                   std::uint32_t first, std::uint32_t count,
                                   std::span<GroupRows> rows) {
  for (const auto& head : heads) head->prepare(first, count);
  for (std::uint32_t query = first; query < first + count; ++query)
    for (std::size_t c = 0; c < heads.front()->runs_.size(); ++c)
      for (std::size_t h = 0; h < heads.size(); ++h) heads[h]->step(c, query, rows[h]);
}

std::vector<HeadOutcome> FeedbackLane::outcomes() {
  std::vector<HeadOutcome> all;
  for (const auto& run : runs_) all.push_back(run->outcome());
  return all;
}

}  // namespace kvlab
