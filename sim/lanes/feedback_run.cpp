#include "sim/lanes/feedback_run.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "policies/observation.hpp"
#include "traces/numeric/softmax.hpp"

namespace kvlab {
namespace {

std::size_t padded(std::size_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

/// Where head h's exponential of the i-th gathered token lies.
std::size_t kept_index(std::size_t i, std::size_t head, std::size_t room_tokens) {
  return head / kQuad * room_tokens * kQuad + i / kBlockTokens * kKeptFloats +
         head % kQuad * kBlockTokens + i % kBlockTokens;
}

}  // namespace

void GatherRoom::resize(std::size_t tokens, std::uint32_t heads) {
  const std::size_t size = padded(tokens);
  if (mass.size() < size) {
    kept.resize(size * heads);
    mass.resize(size);
    asked.resize(size);
    row.resize(size);
  }
  sum.resize(heads);
  most.resize(heads);
  shared.resize(heads);
  least.assign(heads, std::numeric_limits<float>::infinity());
}

FeedbackRun::FeedbackRun(const LaneConfig& config, LiveSet::Identity identity, const HeadView& view,
                         const QuerySpan* span)
    : cache_(config.config->policy, config.budget, config.guards, identity, view.tokens),
      cursor_(*config.admissions),
      view_(view),
      span_(span) {
  if (span) stats_.resize(*span, view.group);
}

bool FeedbackRun::observes(std::uint32_t query) const {
  if (cache_.needs() == Needs::nothing) return false;
  return cache_.needs() == Needs::requests || cursor_.age_of(query) < cache_.tail();
}

void FeedbackRun::attend(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  if (cursor_.begins_at(query)) {
    cache_.make_room(query);
    cache_.admit(query, cursor_.current().tokens);
    begin_observing();
  }
  visible_ = cache_.size() - cursor_.age_of(query);
  const bool measures = span_ && span_->contains(query);
  if (observes(query) || measures) {
    const bool weighted = cache_.needs() == Needs::mass && weight_of(query) != 1.0f;
    if (visible_ == query + 1 && !weighted)
      see_all(query, rows);
    else
      see_kept(query, rows, room);
  }
  if (!cursor_.ends_at(query)) return;
  cursor_.advance();
  cache_.observe(seen_);
}

void FeedbackRun::begin_observing() {
  seen_ = {.query = cursor_.current().first + cursor_.current().tokens - 1,
           .queries = cursor_.current().tokens};
  if (seen_.queries == 1 && cache_.tail() > 0) return;  // the one query brings it all
  mass_.assign(cache_.needs() == Needs::mass ? cache_.size() : 0, 0);
  requests_.assign(cache_.needs() == Needs::requests ? cache_.size() : 0, 0);
  last_request_.assign(requests_.size(), 0);
  seen_.mass = mass_.data();
  seen_.requests = requests_.data();
  seen_.last_request = last_request_.data();
}

void FeedbackRun::see_all(std::uint32_t query, GroupRows& rows) {
  if (observes(query)) {
    if (cache_.needs() == Needs::requests) add_requests(query, rows.asked(query));
    if (cache_.needs() == Needs::mass) add_masses(rows.masses(query));
  }
  if (!span_ || !span_->contains(query)) return;
  measure(query, rows, rows.sums(query));
  if (span_->sampled(query)) take_sample(query, true);
}

void FeedbackRun::see_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  room.resize(visible_, rows.heads());
  const std::size_t room_tokens = room.mass.size();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    row_loops().gather(rows.e(query, quad), cache_.positions().data(), visible_,
                       room.kept.data() + quad * room_tokens * kQuad,
                       room.sum.data() + quad * kQuad, room.most.data() + quad * kQuad);
  room.shared = room.sum;
  const bool measures = span_ && span_->contains(query);
  Sample* const sample =
      measures && span_->sampled(query) ? &take_sample(query, visible_ == query + 1) : nullptr;
  if (sample && !sample->all) {
    sample->sums = room.shared;
    sample->lost.assign(rows.heads(), false);
    sample->outputs.resize(rows.heads() * view_.head_size);
  }
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (room.sum[head] >= kSharedSumFloor) continue;
    take_own_maximum(query, head, rows, room);
    if (!sample || sample->all) continue;
    sample->lost[head] = true;
    float* const out = sample->outputs.data() + head * view_.head_size;
    std::fill(out, out + view_.head_size, 0.0f);
    divide(room.row.data(), visible_, room.sum[head], room.row.data());
    accumulate_rows({room.row.data(), visible_}, visible(), view_.v, view_.kv_token_stride,
                    view_.head_size, out);
  }
  if (observes(query)) {
    if (cache_.needs() == Needs::mass) take_masses(query, rows, room);
    if (cache_.needs() == Needs::requests) take_requests(query, rows, room);
  }
  if (measures) measure(query, rows, room.shared.data());
}

/// The row of a head whose shared exponentials lost their bits, from its own maximum.
void FeedbackRun::take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows,
                                   GatherRoom& room) {
  rows.logits(query, head, visible(), room.row.data());
  shared_exponentials(room.row.data(), visible_, room.row.data());
  room.sum[head] = lane_sum(room.row.data(), visible_);
  room.most[head] = *std::max_element(room.row.begin(), room.row.begin() + visible_);
  for (std::size_t i = 0; i < visible_; ++i)
    room.kept[kept_index(i, head, room.mass.size())] = room.row[i];
}

void FeedbackRun::take_masses(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  const float weight = weight_of(query);
  if (weight != 1.0f) {
    std::fill(room.mass.begin(), room.mass.begin() + visible_, std::uint64_t{0});
    for (std::uint32_t head = 0; head < rows.group(); ++head)
      for (std::size_t i = 0; i < visible_; ++i)
        room.mass[i] +=
            fixed_mass(weight, room.kept[kept_index(i, head, room.mass.size())] / room.sum[head]);
  } else {
    for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
      row_loops().masses(room.kept.data() + quad * room.mass.size() * kQuad, visible_,
                         room.sum.data() + quad * kQuad, quad == 0, room.mass.data());
  }
  add_masses(room.mass.data());
}

void FeedbackRun::take_requests(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    room.least[head] = least_requested(room.sum[head], room.most[head], rows.threshold16());
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    row_loops().mark(room.kept.data() + quad * room.mass.size() * kQuad, visible_,
                     room.least.data() + quad * kQuad, quad == 0, room.asked.data());
  add_requests(query, room.asked.data());
}

void FeedbackRun::add_masses(const std::uint64_t* mass) {
  if (seen_.queries == 1) {
    seen_.mass = mass;
    return;
  }
  for (std::size_t i = 0; i < visible_; ++i) mass_[i] += mass[i];
}

void FeedbackRun::add_requests(std::uint32_t query, const std::uint32_t* asked) {
  if (seen_.queries == 1) {
    seen_.requests = asked;
    return;
  }
  for (std::size_t i = 0; i < visible_; ++i) {
    requests_[i] += asked[i];
    last_request_[i] = asked[i] ? query : last_request_[i];
  }
}

void FeedbackRun::measure(std::uint32_t query, GroupRows& rows, const float* shared) {
  const std::uint32_t block = span_->block(query);
  const GroupRows::Requests wanted = rows.requests(query);
  const bool all = visible_ == query + 1;
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    const double recall =
        all ? 1.0 : static_cast<double>(shared[head]) / static_cast<double>(rows.sums(query)[head]);
    stats_.add_recall(block, head, recall);
    const std::uint64_t hits = all ? wanted.count[head]
                                   : row_loops().common(wanted.bits + head * rows.words(),
                                                        cache_.live_bits(), query / 64 + 1);
    stats_.heads[head].miss.add(block, static_cast<double>(wanted.count[head] - hits),
                                wanted.count[head]);
  }
}

FeedbackRun::Sample& FeedbackRun::take_sample(std::uint32_t query, bool all) {
  if (samples_.size() == sample_count_) samples_.emplace_back();
  Sample& sample = samples_[sample_count_++];
  sample.all = all;
  if (all) return sample;
  sample.live.assign(cache_.live_bits(), cache_.live_bits() + query / 64 + 1);
  // Younger queries of the admission are live but not seen.
  if (const std::uint32_t used = query % 64 + 1; used < 64)
    sample.live.back() &= (std::uint64_t{1} << used) - 1;
  return sample;
}

}  // namespace kvlab
