#include "sim/lanes/feedback/feedback_lane.hpp"

#include <algorithm>

namespace kvlab {
namespace {

constexpr std::uint32_t kTailTokens = 64;  // of a range whose sum all squeezed sets share

/// The first range that begins at `token` or later.
std::uint32_t first_whole(std::uint32_t token) { return (token + kTailTokens - 1) / kTailTokens; }

}  // namespace

FeedbackLane::FeedbackLane(LaneConfigs configs, LiveSet::Identity identity, const HeadView& view,
                           const QuerySpan* span, std::unique_ptr<PlaceTable> places,
                           std::unique_ptr<GroupRows> unrounded)
    : span_(span),
      group_(view.group),
      unrounded_(std::move(unrounded)),
      places_(std::move(places)),
      unrounded_samples_(view) {
  for (const ResolvedConfig* config : configs) {
    identity.seed = config->seed;
    runs_.push_back(std::make_unique<FeedbackRun>(*config, identity, view, span));
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
  if (unrounded_ && wanted) {
    std::uint32_t from = first;  // what no run shares yet is not looked at
    for (const auto& run : runs_) from = std::min(from, run->first_shared());
    unrounded_->compute(first, count, from);
  }
  room_.admissions.forget_before(first);
  const auto step = [&](std::size_t c, std::uint32_t query) {
    runs_[c]->attend(query, rows, unrounded_ ? unrounded_.get() : &rows, places_.get(), room_);
    if (watcher_) watcher_(c, query, runs_[c]->visible());
  };
  // A row stays near while all configurations take it; keys of one's own are more than a row.
  if (places_) {
    for (std::size_t c = 0; c < runs_.size(); ++c)
      for (std::uint32_t query = first; query < first + count; ++query) step(c, query);
  } else {
    for (std::uint32_t query = first; query < first + count; ++query)
      for (std::size_t c = 0; c < runs_.size(); ++c) step(c, query);
  }
  for (std::uint32_t query = first; unrounded_ && span_ && query < first + count; ++query)
    if (span_->contains(query) && span_->sampled(query)) unrounded_samples_.add(query, *unrounded_);
}

/// Neighbouring sampled queries keep nearly the same tokens, so each configuration's jobs follow
/// one another.
void FeedbackLane::list_outputs(const SampledRows& rows, std::vector<ValueJob>& jobs) {
  chains_.resize(std::max(chains_.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    chains_[i].begin(rows, i);
    for (const auto& run : runs_) {
      const FeedbackRun::Sample& sample = run->sample(i);
      if (!sample.all && !sample.own) chains_[i].move_to(sample.live.data(), sample.sums.data());
    }
  }
  list_tails(rows, jobs);
  std::vector<std::size_t> next(rows.size());
  for (const auto& run : runs_)
    for (std::size_t i = 0; i < rows.size(); ++i) {
      FeedbackRun::Sample& sample = run->sample(i);
      if (sample.own)
        list_own(rows, sample, jobs);
      else if (!sample.all)
        chains_[i].list_jobs(next[i]++, jobs);
    }
}

/// The job of exponentials that a run has of its own.
void FeedbackLane::list_own(const SampledRows& rows, FeedbackRun::Sample& sample,
                            std::vector<ValueJob>& jobs) const {
  const std::size_t dim = rows.view().head_size, count = sample.tokens.size();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    jobs.push_back({sample.kept.data() + quad * count * kQuad, sample.tokens.data(), count,
                    sample.outputs.data() + quad * kQuad * dim, 0, rows.view().heads_in(quad)});
}

/// The youngest tokens of squeezed sets, whose exponentials all share: sums over ranges of tokens
/// that depend on no configuration, and what each set has before its first whole range.
void FeedbackLane::list_tails(const SampledRows& rows, std::vector<ValueJob>& jobs) {
  const SampledRows& e = unrounded_ ? unrounded_samples_ : rows;
  const std::size_t dim = rows.view().head_size, size = rows.heads() * dim;
  if (!places_) return;
  tails_.resize(std::max(tails_.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint32_t end = rows.query(i) + 1, ranges = (end + kTailTokens - 1) / kTailTokens;
    const auto list = [&](std::uint32_t first, std::uint32_t last, float* y) {
      for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
        jobs.push_back({e.e(i, quad) + first * kQuad, nullptr, last - first, y + quad * kQuad * dim,
                        first, rows.view().heads_in(quad)});
    };
    std::uint32_t least = ranges;
    for (const auto& run : runs_) {
      FeedbackRun::Sample& sample = run->sample(i);
      if (!sample.own) continue;
      const std::uint32_t whole = first_whole(sample.first);
      least = std::min(least, whole);
      sample.tail.assign(size, 0.0f);
      list(sample.first, std::min(whole * kTailTokens, end), sample.tail.data());
    }
    tails_[i].assign((ranges + 1) * size, 0.0f);
    for (std::uint32_t r = least; r < ranges; ++r)
      list(r * kTailTokens, std::min((r + 1) * kTailTokens, end), tails_[i].data() + r * size);
  }
}

void FeedbackLane::finish_outputs(const SampledRows& rows) {
  const std::size_t size = rows.heads() * rows.view().head_size;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    chains_[i].finish();
    for (std::size_t d = places_ ? tails_[i].size() - size : 0; d-- > 0;)
      tails_[i][d] += tails_[i][d + size];
    std::size_t link = 0;
    for (const auto& run : runs_) {
      FeedbackRun::Sample& sample = run->sample(i);
      if (sample.own) {
        const std::size_t whole =
            std::min<std::size_t>(first_whole(sample.first) * size, tails_[i].size() - size);
        for (std::size_t d = 0; d < size; ++d) sample.tail[d] += tails_[i][whole + d];
      }
      measure_outputs(rows, i, *run,
                      sample.all   ? nullptr
                      : sample.own ? sample.tail.data()
                                   : chains_[i].sums(link++));
    }
  }
  for (const auto& run : runs_) run->forget_samples();
  unrounded_samples_.clear();
}

/// `shared`: the sums of the shared exponentials' values, [heads][dim].
void FeedbackLane::measure_outputs(const SampledRows& rows, std::size_t i, FeedbackRun& run,
                                   const float* shared) {
  const std::size_t dim = rows.view().head_size;
  FeedbackRun::Sample& sample = run.sample(i);
  const QuerySpan::Place place = span_->place(rows.query(i));
  for (std::uint32_t head = 0; head < group_; ++head) {
    double error = 0;
    if (!sample.all) {
      float* const own = sample.outputs.data() + head * dim;
      if (sample.own && !sample.lost[head])
        for (std::size_t d = 0; d < dim; ++d) own[d] += shared[head * dim + d];
      const float* const sum = sample.own || sample.lost[head] ? own : shared + head * dim;
      error = row_loops().distance2(rows.output(i, head), sum, 1 / sample.sums[head], dim);
    }
    run.stats().add_error(place, head, error, rows.norm2(i, head));
  }
}

std::vector<HeadOutcome> FeedbackLane::outcomes() {
  std::vector<HeadOutcome> all;
  for (const auto& run : runs_) {
    run->flush();
    all.push_back({std::move(run->stats()), run->cache().evictions(), run->cache().live_max(),
                   run->cache().size()});
  }
  return all;
}

}  // namespace kvlab
