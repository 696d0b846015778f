#include "sim/lanes/feedback_lane.hpp"

#include <algorithm>

#include "traces/numeric/softmax.hpp"

namespace kvlab {

FeedbackLane::FeedbackLane(std::vector<LaneConfig> configs, LiveSet::Identity identity,
                           const HeadView& view, const QuerySpan* span,
                           std::unique_ptr<PlaceTable> places, std::unique_ptr<GroupRows> unrounded)
    : configs_(std::move(configs)),
      span_(span),
      group_(view.group),
      unrounded_(std::move(unrounded)),
      places_(std::move(places)) {
  for (const LaneConfig& config : configs_) {
    identity.seed = config.config->seed;
    runs_.push_back(std::make_unique<FeedbackRun>(config, identity, view, span));
    observes_ |= runs_.back()->cache().needs() != Needs::nothing;
  }
}

FeedbackLane::~FeedbackLane() = default;

bool FeedbackLane::wants_row(std::uint32_t query) const {
  return observes_ || (span_ && span_->contains(query));
}

void FeedbackLane::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  bool wanted = observes_;
  for (std::uint32_t query = first; query < first + count; ++query) wanted |= wants_row(query);
  if (unrounded_ && wanted) unrounded_->compute(first, count);
  for (std::size_t c = 0; c < runs_.size(); ++c) {
    runs_[c]->forget_samples();
    for (std::uint32_t query = first; query < first + count; ++query) {
      runs_[c]->attend(query, rows, unrounded_ ? unrounded_.get() : &rows, places_.get(), room_);
      if (watcher_) watcher_(c, query, runs_[c]->visible());
    }
  }
  if (!span_) return;
  std::uint32_t sample = 0;
  for (std::uint32_t query = first; query < first + count; ++query)
    if (span_->contains(query) && span_->sampled(query)) measure_outputs(query, sample++, rows);
}

/// Outputs of exponentials that each run has of its own, all runs by ranges of tokens, so that
/// values are read once.
void FeedbackLane::take_own_outputs(std::uint32_t index, const GroupRows& rows) {
  constexpr std::uint32_t kRange = 64;
  const HeadView& view = rows.view();
  const std::size_t dim = view.head_size;
  std::vector<std::size_t> next(runs_.size());
  std::uint32_t last = 0;
  for (const auto& run : runs_) {
    FeedbackRun::Sample& sample = run->sample(index);
    sample.outputs.assign(rows.heads() * dim, 0.0f);
    last = std::max(last, sample.tokens.back());
  }
  for (std::uint32_t end = kRange; end < last + 1 + kRange; end += kRange)
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      FeedbackRun::Sample& sample = runs_[r]->sample(index);
      const std::size_t begin = next[r], size = sample.kept.size() / rows.quads();
      while (next[r] < sample.tokens.size() && sample.tokens[next[r]] < end) ++next[r];
      for (std::uint32_t quad = 0; quad < rows.quads() && begin < next[r]; ++quad)
        row_loops().accumulate(sample.kept.data() + quad * size + begin * kQuad,
                               sample.tokens.data() + begin, next[r] - begin, view.v,
                               view.kv_token_stride, dim,
                               sample.outputs.data() + quad * kQuad * dim);
    }
  for (const auto& run : runs_)
    for (std::uint32_t head = 0; head < group_; ++head) {
      FeedbackRun::Sample& sample = run->sample(index);
      float* const out = sample.outputs.data() + head * dim;
      divide(out, dim, sample.sums[head], out);
    }
}

void FeedbackLane::measure_outputs(std::uint32_t query, std::uint32_t index, GroupRows& rows) {
  const std::size_t dim = rows.view().head_size;
  const float* const full = rows.outputs(query);
  std::vector<float> divided(dim);
  chain_.begin(query, rows);
  if (places_) take_own_outputs(index, rows);
  for (const auto& run : runs_) {
    const FeedbackRun::Sample& sample = run->sample(index);
    const float* const sum =
        sample.all || sample.own ? nullptr : chain_.move_to(sample.live.data(), sample.sums.data());
    for (std::uint32_t head = 0; head < group_; ++head) {
      const float* kept = full + head * dim;
      if (!sample.all && (sample.own || sample.lost[head])) {
        kept = sample.outputs.data() + head * dim;
      } else if (!sample.all) {
        for (std::size_t d = 0; d < dim; ++d) divided[d] = sum[head * dim + d] / sample.sums[head];
        kept = divided.data();
      }
      run->stats().add_outputs(*span_, query, head, {full + head * dim, dim}, {kept, dim});
    }
  }
}

std::vector<LaneOutcome> FeedbackLane::outcomes() {
  std::vector<LaneOutcome> all;
  for (const auto& run : runs_)
    all.push_back({std::move(run->stats()), run->cache().evictions(), run->cache().live_max(),
                   run->cache().size()});
  return all;
}

}  // namespace kvlab
