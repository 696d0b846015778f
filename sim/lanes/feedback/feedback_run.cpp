#include "sim/lanes/feedback/feedback_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "policies/observation.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

/// Whether the shared exponentials are of no use to some head of the group.
bool has_lost(const GatherRoom& room, std::uint32_t group) {
  return std::any_of(room.sum.begin(), room.sum.begin() + group,
                     [](float sum) { return sum < kSharedSumFloor; });
}

/// Where head h's exponential of the i-th gathered token lies.
std::size_t kept_index(std::size_t i, std::size_t head, std::size_t room_tokens) {
  return head / kQuad * room_tokens * kQuad + i * kQuad + head % kQuad;
}

}  // namespace

void GatherRoom::resize(std::size_t tokens, std::uint32_t heads) {
  const std::size_t size = whole_blocks(tokens);
  if (mass.size() < size) {
    kept.resize(size * heads);
    mass.resize(size);
    asked.resize(size + 64);
    row.resize(size);
  }
  sum.resize(heads);
  most.resize(heads);
  shared.resize(heads);
  least.assign(heads, std::numeric_limits<float>::infinity());
}

FeedbackRun::FeedbackRun(const ResolvedConfig& config, LiveSet::Identity identity,
                         const HeadView& view, const QuerySpan* span)
    : cache_(config.policy, config.budget_tokens, config.guards, identity, view.tokens),
      squeezed_(config.positions == Positions::cache),
      weighted_(config.policy.entry->info.weighted),
      old_keys_(view),
      cursor_(config.admissions),
      view_(view),
      span_(span),
      tally_(1, view.group) {
  if (span) stats_.resize(*span, view.group);
}

bool FeedbackRun::observes(std::uint32_t query) const {
  if (cache_.needs() == Needs::nothing) return false;
  return cache_.needs() == Needs::requests || cursor_.age_of(query) < cache_.tail();
}

/// Whether what the query gives is what it gives in every cache that still has all tokens.
bool FeedbackRun::has_whole_row(std::uint32_t query) const {
  return visible_ == query + 1 && (cache_.needs() != Needs::mass || weight_of(query) == 1.0f);
}

void FeedbackRun::attend(std::uint32_t query, GroupRows& rows, GroupRows* unrounded,
                         const PlaceTable* places, GatherRoom& room) {
  if (cursor_.begins_at(query)) {
    make_room(query);
    cache_.admit(query, cursor_.current().tokens);
    begin_observing(room);
  }
  visible_ = cache_.size() - cursor_.age_of(query);
  const bool measures = span_ && span_->contains(query);
  if (observes(query) || measures) {
    if (squeezed_)
      see_squeezed(query, rows, *unrounded, *places, room);
    else if (has_whole_row(query))
      see_all(query, rows);
    else if (!see_bits(query, rows, room) && !see_masses(query, rows, room))
      see_kept(query, rows, room);
  }
  if (!cursor_.ends_at(query)) return;
  cursor_.advance();
  cache_.observe(seen_);
}

/// Tokens older than a victim have lost a younger one from now on.
void FeedbackRun::make_room(std::uint32_t now) {
  const std::size_t before = old_keys_.size();
  const auto victims = cache_.make_room(now);
  if (!squeezed_ || victims.empty()) return;
  const auto live = cache_.positions();
  if (victims.size() == 1 && victims[0] < before) return old_keys_.erase(victims[0]);
  std::size_t old = victims[0];
  if (victims.size() > 1) {
    old_keys_.clear();
    for (old = live.size(); old > 0 && live[old - 1] + 1 == now - (live.size() - old);) --old;
  }
  for (std::size_t i = old_keys_.size(); i < old; ++i) old_keys_.append(live[i]);
}

void FeedbackRun::begin_observing(GatherRoom& room) {
  whole_ = nullptr;
  seen_ = {.query = cursor_.current().first + cursor_.current().tokens - 1,
           .queries = cursor_.current().tokens};
  if (seen_.queries == 1 && cache_.tail() > 0) return;  // the one query brings it all
  if (!weighted_ && cache_.needs() != Needs::nothing && cache_.size() == seen_.query + 1) {
    whole_ = &room.admissions.at(cursor_.current(), cache_.needs());
    seen_.mass = whole_->mass.data();
    seen_.requests = whole_->requests.data();
    seen_.last_request = whole_->last_request.data();
    return;
  }
  mass_.assign(cache_.needs() == Needs::mass ? cache_.size() : 0, 0);
  requests_.assign(cache_.needs() == Needs::requests ? cache_.size() : 0, 0);
  last_request_.assign(requests_.size(), 0);
  seen_.mass = mass_.data();
  seen_.requests = requests_.data();
  seen_.last_request = last_request_.data();
}

void FeedbackRun::observe_all(std::uint32_t query, GroupRows& rows) {
  if (!observes(query)) return;
  if (whole_) return whole_->see(query, cache_.needs(), rows);
  if (cache_.needs() == Needs::requests) add_requests(query, rows.asked(query));
  if (cache_.needs() == Needs::mass) add_masses(rows.masses(query));
}

void FeedbackRun::see_all(std::uint32_t query, GroupRows& rows) {
  observe_all(query, rows);
  if (!span_ || !span_->contains(query)) return;
  measure(query, rows, rows.sums(query));
  if (span_->sampled(query)) take_sample(query, true);
}

/// Where no probability is asked for: sums of the live set, and requests by its bits. False: the
/// row has to be gathered, and nothing is done.
bool FeedbackRun::see_bits(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  const bool asks = cache_.needs() == Needs::requests;
  if (visible_ > query || (!asks && observes(query))) return false;
  room.resize(visible_, rows.heads());
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    row_loops().sum(rows.e(query, quad), cache_.positions().data(), visible_,
                    room.sum.data() + quad * kQuad, room.most.data() + quad * kQuad);
  const std::uint64_t* const asked =
      asks ? room.requests.ask(query, rows, room.most.data(), cache_.live_bits()) : nullptr;
  if (asks && !asked) return false;
  if (span_ && span_->contains(query) && !measure_shared(query, rows, room)) return false;
  if (!asks) return true;
  row_loops().spread(asked, cache_.live_bits(), query / 64 + 1, room.asked.data());
  add_requests(query, room.asked.data());
  return true;
}

/// Masses, without a copy of the youngest tokens, which follow one another. False: as see_bits().
bool FeedbackRun::see_masses(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  if (cache_.needs() != Needs::mass || visible_ > query || !observes(query)) return false;
  if (weight_of(query) != 1.0f) return false;
  room.resize(visible_, rows.heads());
  const std::size_t end = visible_ / kBlockTokens * kBlockTokens,
                    begin = std::min(whole_blocks(cache_.following()), end),
                    stride = room.mass.size();
  const std::uint32_t* const tokens = cache_.positions().data();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    row_loops().gather_around(rows.e(query, quad), tokens, begin, end, visible_,
                              room.kept.data() + quad * stride * kQuad,
                              room.sum.data() + quad * kQuad);
  if (has_lost(room, rows.group())) return false;
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    const float* const kept = room.kept.data() + quad * stride * kQuad;
    const float* const sum = room.sum.data() + quad * kQuad;
    const auto add = [&](const float* e, std::size_t from, std::size_t to) {
      row_loops().masses(e, to - from, sum, quad == 0, room.mass.data() + from);
    };
    add(kept, 0, begin);
    if (begin < end) add(rows.e(query, quad) + tokens[begin] * kQuad, begin, end);
    add(kept + begin * kQuad, end, visible_);
  }
  if (span_ && span_->contains(query)) measure_shared(query, rows, room);
  add_masses(room.mass.data());
  return true;
}

/// Figures from the sums of the shared exponentials, room.sum. False: they are of no use to a
/// sample's outputs, and nothing is done.
bool FeedbackRun::measure_shared(std::uint32_t query, GroupRows& rows, const GatherRoom& room) {
  const bool sampled = span_->sampled(query);
  if (sampled && has_lost(room, rows.group())) return false;
  measure(query, rows, room.sum.data());
  if (sampled) take_shared_sample(query, room.sum);
  return true;
}

/// A live set's, whose outputs are taken from the shared exponentials.
FeedbackRun::Sample& FeedbackRun::take_shared_sample(std::uint32_t query,
                                                     const std::vector<float>& sums) {
  Sample& sample = take_sample(query, false);
  sample.sums = sums;
  sample.lost.assign(sums.size(), false);
  sample.outputs.resize(sums.size() * view_.head_size);
  return sample;
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
  Sample* sample = nullptr;  // but of the whole row
  if (measures && span_->sampled(query)) {
    if (visible_ == query + 1)
      take_sample(query, true);
    else
      sample = &take_shared_sample(query, room.shared);
  }
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (room.sum[head] >= kSharedSumFloor) continue;
    take_own_maximum(query, head, rows, room);
    if (sample) take_own_output(head, room, *sample);
  }
  observe_kept(query, rows, room);
  if (measures) measure(query, rows, room.shared.data());
}

/// The output of a head from its gathered exponentials.
void FeedbackRun::take_own_output(std::uint32_t head, const GatherRoom& room, Sample& sample) {
  std::vector<float> e(visible_);
  for (std::size_t i = 0; i < visible_; ++i)
    e[i] = room.kept[kept_index(i, head, room.mass.size())];
  sample.lost[head] = true;
  sample.sums[head] = room.sum[head];
  float* const out = sample.outputs.data() + head * view_.head_size;
  std::fill(out, out + view_.head_size, 0.0f);
  accumulate_rows(e, visible(), view_.v, view_.kv_token_stride, view_.head_size, out);
}

void FeedbackRun::observe_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  if (!observes(query)) return;
  if (cache_.needs() == Needs::mass) take_masses(query, rows, room);
  if (cache_.needs() == Needs::requests) take_requests(query, rows, room);
}

/// Probabilities from logits at squeezed positions; recall and misses from the full cache's rows.
void FeedbackRun::see_squeezed(std::uint32_t query, GroupRows& rows, GroupRows& unrounded,
                               const PlaceTable& places, GatherRoom& room) {
  room.resize(visible_, rows.heads());
  const bool measures = span_ && span_->contains(query),
             samples = measures && span_->sampled(query), whole = has_whole_row(query);
  if (whole)
    take_whole(query, unrounded, room);
  else if (observes(query) || samples)
    take_squeezed(query, unrounded, places, room);
  if (samples) take_squeezed_sample(query, rows, room);
  if (whole)
    observe_all(query, unrounded);
  else
    observe_kept(query, rows, room);
  if (!measures) return;
  if (!whole) add_shared(query, rows, room.shared.data());
  measure(query, rows, room.shared.data());
}

/// A row of unrounded logits, nothing of which is the run's own.
void FeedbackRun::take_whole(std::uint32_t query, const GroupRows& unrounded,
                             GatherRoom& room) const {
  room.sum.assign(unrounded.sums(query), unrounded.sums(query) + unrounded.heads());
  room.lost.assign(unrounded.heads(), false);
}

void FeedbackRun::take_squeezed_sample(std::uint32_t query, const GroupRows& rows,
                                       const GatherRoom& room) {
  Sample& sample = take_sample(query, false);
  const std::size_t old = old_keys_.size();
  sample.own = true;
  sample.first = cache_.positions()[old];
  sample.sums = room.sum;
  sample.lost.assign(rows.heads(), false);
  sample.outputs.assign(rows.heads() * view_.head_size, 0.0f);
  sample.tokens.assign(visible().begin(), visible().begin() + static_cast<std::ptrdiff_t>(old));
  sample.kept.clear();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    const float* const kept = room.kept.data() + quad * room.mass.size() * kQuad;
    sample.kept.insert(sample.kept.end(), kept, kept + old * kQuad);
  }
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (!room.lost[head]) continue;
    for (std::size_t i = 0; i < old; ++i)
      sample.kept[kept_index(i, head, old)] = 0;  // the job adds nothing to what is complete
    take_own_output(head, room, sample);
  }
}

/// Sums of the full cache's exponentials over the live set, [heads], no larger than the row's. From
/// old_keys_ on live tokens follow one another.
void FeedbackRun::add_shared(std::uint32_t query, GroupRows& rows, float* sums) const {
  const auto live = visible();
  const std::size_t old = old_keys_.size();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    float scattered[kQuad], unused[kQuad];
    row_loops().sum(rows.e(query, quad), live.data(), old, scattered, unused);
    const auto following = rows.sums_from(query, quad, live[old]);
    for (std::size_t h = 0; h < kQuad; ++h)
      sums[quad * kQuad + h] = std::min(static_cast<float>(following[h]) + scattered[h],
                                        rows.sums(query)[quad * kQuad + h]);
  }
}

/// A quad's queries, each rotated to its number.
void FeedbackRun::rotate_queries(std::uint32_t query, std::uint32_t quad, const PlaceTable& places,
                                 GatherRoom& room, const float** queries) const {
  const std::size_t dim = view_.head_size;
  room.rotated.resize(kQuad * dim);
  for (std::uint32_t h = 0; h < kQuad && quad * kQuad + h < view_.group; ++h) {
    float* const to = room.rotated.data() + h * dim;
    places.rope().rotate(view_.query(quad * kQuad + h, query), dim, visible_ - 1, to);
    queries[h] = to;
  }
}

/// Gathers exponentials of logits at squeezed places: those of tokens that have lost a younger one
/// are the run's own, the others the full cache's.
void FeedbackRun::take_squeezed(std::uint32_t query, GroupRows& unrounded, const PlaceTable& places,
                                GatherRoom& room) {
  const std::size_t old = old_keys_.size(), stride = room.mass.size() + kPanelTokens;
  room.products.resize(stride * kQuad);
  room.lost.assign(unrounded.heads(), false);
  for (std::uint32_t quad = 0; quad < unrounded.quads(); ++quad) {
    const float *queries[kQuad] = {}, *products[kQuad] = {};
    rotate_queries(query, quad, places, room, queries);
    for (std::size_t h = 0; h < kQuad && queries[h]; ++h)
      products[h] = room.products.data() + h * stride;
    old_keys_.products(queries, places, room.products.data(), stride);
    row_loops().join(products, old, unrounded.softmax_scale(),
                     unrounded.shifts(query) + quad * kQuad,
                     unrounded.e(query, quad) + cache_.positions()[old] * kQuad, visible_ - old,
                     room.kept.data() + quad * room.mass.size() * kQuad,
                     room.sum.data() + quad * kQuad, room.most.data() + quad * kQuad);
    for (std::uint32_t h = 0; h < kQuad && products[h]; ++h)
      if (room.sum[quad * kQuad + h] < kSharedSumFloor)
        take_own_squeezed(query, quad * kQuad + h, unrounded, room);
  }
}

/// The same for one head from its own maximum; room.products holds those of the old keys.
void FeedbackRun::take_own_squeezed(std::uint32_t query, std::uint32_t head,
                                    const GroupRows& unrounded, GatherRoom& room) {
  const std::size_t old = old_keys_.size(), stride = room.mass.size() + kPanelTokens;
  std::copy_n(room.products.data() + head % kQuad * stride, old, room.row.data());
  scale(room.row.data(), old, unrounded.softmax_scale());
  unrounded.logits(query, head, visible().subspan(old), room.row.data() + old);
  take_own_row(head, room);
  room.lost[head] = true;
}

/// The row of a head whose shared exponentials lost their bits, from its own maximum.
void FeedbackRun::take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows,
                                   GatherRoom& room) {
  rows.logits(query, head, visible(), room.row.data());
  take_own_row(head, room);
}

/// A head's gathered exponentials from the logits in room.row.
void FeedbackRun::take_own_row(std::uint32_t head, GatherRoom& room) const {
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
  const GroupRows::Requests wanted = rows.requests(query);
  tally_.begin_query(span_->block(query), wanted.count, {&stats_, 1});
  const bool all = visible_ == query + 1;
  const std::uint64_t* const bits = all ? nullptr : rows.request_bits(query);
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    const double recall =
        all ? 1.0 : static_cast<double>(shared[head]) / static_cast<double>(rows.sums(query)[head]);
    const std::uint64_t hits =
        all ? wanted.count[head]
            : row_loops().common(bits + head * rows.words(), cache_.live_bits(), query / 64 + 1);
    tally_.add(0, head, recall, static_cast<double>(wanted.count[head] - hits));
  }
}

FeedbackRun::Sample& FeedbackRun::take_sample(std::uint32_t query, bool all) {
  if (samples_.size() == sample_count_) samples_.emplace_back();
  Sample& sample = samples_[sample_count_++];
  sample.all = all;
  sample.own = false;
  if (all) return sample;
  sample.live.assign(cache_.live_bits(), cache_.live_bits() + query / 64 + 1);
  // Younger queries of the admission are live but not seen.
  if (const std::uint32_t used = query % 64 + 1; used < 64)
    sample.live.back() &= (std::uint64_t{1} << used) - 1;
  return sample;
}

}  // namespace kvlab
