#include "sim/lanes/feedback/feedback_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "policies/observation.hpp"
#include "sim/coded_rows.hpp"
#include "traces/base/numeric/code.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

/// Where head h's exponential of the i-th gathered token lies.
std::size_t kept_index(std::size_t i, std::size_t head, std::size_t room_tokens) {
  return head / kQuad * room_tokens * kQuad + i * kQuad + head % kQuad;
}

}  // namespace

void GatherRoom::resize(std::size_t tokens, std::uint32_t heads) {
  const std::size_t size = whole_blocks(tokens);
  if (mass.size() < size) {
    ages.resize(size);
    std::iota(ages.begin(), ages.end(), 0u);
    kept.resize(size * heads);
    mass.resize(size);
    asked.resize(size);
    row.resize(size);
  }
  sum.resize(heads);
  most.resize(heads);
  shared.resize(heads);
  lost.assign(heads, false);
  least.assign(heads, std::numeric_limits<float>::infinity());
}

FeedbackRun::FeedbackRun(const ResolvedConfig& config, LiveSet::Identity identity,
                         const HeadView& view, const QuerySpan* span, RungRows* coded)
    : cache_(config.policy, config.budget_tokens, config.guards, identity, view.tokens),
      columns_(cache_.columns(), view, config.admissions),
      squeezed_(config.positions == Positions::cache),
      old_keys_(view),
      cursor_(config.admissions),
      view_(view),
      measure_(span, 1, view) {
  if (config.shares_slots()) cache_.share_slots();
  if (const auto own = config.rungs.find(config.budget_tokens); own != config.rungs.end())
    cache_.keep_at(own->second);
  if (!cache_.has_codes()) return;
  rungs_ = coded->of(cache_.ladder());
  if (span) measure_.separate_codes();
}

bool FeedbackRun::observes(std::uint32_t query) const {
  if (cache_.needs() == Needs::nothing) return false;
  return needs_requests(cache_.needs()) || cursor_.age_of(query) < cache_.tail();
}

/// Whether what the query gives is what it gives in every cache that still has all tokens.
bool FeedbackRun::has_whole_row(std::uint32_t query) const {
  return visible_ == query + 1 &&
         (!needs_mass(cache_.needs()) || (weight_of(query) == 1.0f && !by_largest()));
}

void FeedbackRun::attend(std::uint32_t query, GroupRows& rows, GroupRows* unrounded,
                         const PlaceTable* places, GatherRoom& room) {
  if (cursor_.begins_at(query)) {
    make_room(query);
    cache_.admit(query, cursor_.current().tokens, columns_.from(query));
    begin_observing();
  }
  visible_ = cache_.size() - cursor_.age_of(query);
  if (observes(query) || measure_.measures(query)) {
    if (squeezed_)
      see_squeezed(query, rows, *unrounded, *places, room);
    else if (find_codes(room))
      see_coded(query, rows, room);
    else if (has_whole_row(query))
      see_all(query, rows);
    else
      see_kept(query, rows, room);
  }
  if (!cursor_.ends_at(query)) return;
  cache_.observe(seen_);
  if (cursor_.current().ends_prompt) cache_.end_prompt();
  cursor_.advance();
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

void FeedbackRun::begin_observing() {
  seen_ = {.query = cursor_.current().first + cursor_.current().tokens - 1,
           .queries = cursor_.current().tokens};
  if (seen_.queries == 1 && cache_.tail() > 0) return;  // the one query brings it all
  mass_.assign(needs_mass(cache_.needs()) ? cache_.size() : 0, 0);
  requests_.assign(needs_requests(cache_.needs()) ? cache_.size() : 0, 0);
  last_request_.assign(requests_.size(), 0);
  seen_.mass = mass_.data();
  seen_.requests = requests_.data();
  seen_.last_request = last_request_.data();
}

void FeedbackRun::observe_all(std::uint32_t query, GroupRows& rows) {
  if (!observes(query)) return;
  if (needs_requests(cache_.needs())) add_requests(query, rows.asked(query));
  if (needs_mass(cache_.needs())) add_masses(rows.masses(query));
}

void FeedbackRun::see_all(std::uint32_t query, GroupRows& rows) {
  observe_all(query, rows);
  if (!measure_.measures(query)) return;
  measure(query, rows, rows.sums(query));
  measure_outputs(query, rows, nullptr);
}

/// The exponentials of what is live, and their sums, which are recall's.
void FeedbackRun::gather_kept(std::uint32_t query, const GroupRows& rows, GatherRoom& room) const {
  room.resize(visible_, rows.heads());
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad)
    row_loops().gather(rows.e(query, quad), cache_.positions().data(), visible_,
                       room.kept.data() + quad * room.mass.size() * kQuad,
                       room.sum.data() + quad * kQuad, room.most.data() + quad * kQuad);
  room.shared = room.sum;
}

void FeedbackRun::take_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  gather_kept(query, rows, room);
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    if (room.sum[head] < kSharedSumFloor) take_own_maximum(query, head, rows, room);
}

void FeedbackRun::take_kept_outputs(std::uint32_t query, const GroupRows& rows,
                                    GatherRoom& room) const {
  const float* const values = room.chain.move_to(query, rows, cache_.live_bits(), room.sum.data());
  room.outputs.assign(values, values + rows.heads() * std::size_t{view_.head_size});
  take_own_outputs(room);
}

void FeedbackRun::see_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  take_kept(query, rows, room);
  observe_kept(query, rows, room);
  if (!measure_.measures(query)) return;
  measure(query, rows, room.shared.data());
  if (visible_ == query + 1) return measure_outputs(query, rows, nullptr);
  if (!takes_outputs(query, rows)) return;
  take_kept_outputs(query, rows, room);
  measure_outputs(query, rows, &room);
}

/// Which source each token is in, to room.source: whether any is coded. What an admission of
/// several tokens brings is exact until it ends.
bool FeedbackRun::find_codes(GatherRoom& room) const {
  if (rungs_.empty()) return false;
  const auto rungs = cache_.rungs();
  room.source.assign(visible_, 0);
  std::ranges::copy(rungs.first(std::min<std::size_t>(rungs.size(), visible_)),
                    room.source.begin());
  const Admission& admission = cursor_.current();
  for (std::uint32_t age = visible_; admission.tokens > 1 && age > 0; --age) {
    if (cache_.positions()[age - 1] < admission.first) break;
    room.source[age - 1] = static_cast<std::uint8_t>(rungs_.size());
  }
  return std::ranges::any_of(room.source, [&](std::uint8_t source) { return row_of(source); });
}

/// Probabilities from the rows of the rungs; recall and misses from the full cache's.
void FeedbackRun::see_coded(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  gather_kept(query, rows, room);
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) take_codes(query, quad, rows, room);
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    if (room.sum[head] < kSharedSumFloor) take_own_coded(query, head, rows, room);
  observe_kept(query, rows, room);
  if (!measure_.measures(query)) return;
  measure(query, rows, room.shared.data());
  if (!takes_outputs(query, rows)) return;
  take_coded_outputs(rows, room);
  measure_outputs(query, rows, &room);
  if (measure_.wants_coding(query)) measure_coding(query, rows, room);
}

/// The outputs of the same tokens in 16 bit, beside those of room.outputs.
void FeedbackRun::measure_coding(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  const std::vector<float> coded = room.outputs, sums = room.sum;
  take_kept(query, rows, room);
  take_kept_outputs(query, rows, room);
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    float* const exact = room.outputs.data() + head * std::size_t{view_.head_size};
    scale(exact, view_.head_size, 1 / room.sum[head]);
    measure_.add_coding(0, head, exact, coded.data() + (exact - room.outputs.data()),
                        1 / sums[head]);
  }
}

/// Puts the coded tokens' exponentials among the gathered ones, all at the largest shift of the
/// rows: another shift is an exact power of two.
void FeedbackRun::take_codes(std::uint32_t query, std::uint32_t quad, const GroupRows& rows,
                             GatherRoom& room) const {
  std::int32_t shift[kQuad];
  std::copy_n(rows.shifts(query) + quad * kQuad, kQuad, shift);
  for (const RungRow* const rung : rungs_)
    for (std::size_t h = 0; rung && h < kQuad; ++h)
      shift[h] = std::max(shift[h], rung->rows.shifts(query)[quad * kQuad + h]);
  const auto factors = [&](const GroupRows& of) {
    std::array<float, kQuad> factor;
    for (std::size_t h = 0; h < kQuad; ++h)
      factor[h] = std::ldexp(1.0f, of.shifts(query)[quad * kQuad + h] - shift[h]);
    return factor;
  };
  room.sources.clear();
  for (const RungRow* const rung : rungs_) {
    const GroupRows& of = rung ? rung->rows : rows;
    room.sources.push_back({of.e(query, quad), factors(of)});
  }
  room.sources.push_back({rows.e(query, quad), factors(rows)});  // of what is exact

  float* const kept = room.kept.data() + quad * room.mass.size() * kQuad;
  const std::uint32_t* const positions = cache_.positions().data();
  for (std::size_t i = 0; i < visible_; ++i) {
    const auto& [e, factor] = room.sources[room.source[i]];
    std::array<float, kQuad> own;
    for (std::size_t h = 0; h < kQuad; ++h) own[h] = e[positions[i] * kQuad + h] * factor[h];
    std::ranges::copy(own, kept + i * kQuad);
  }
  row_loops().gather(kept, room.ages.data(), visible_, kept, room.sum.data() + quad * kQuad,
                     room.most.data() + quad * kQuad);
}

void FeedbackRun::take_own_coded(std::uint32_t query, std::uint32_t head, const GroupRows& rows,
                                 GatherRoom& room) const {
  for (std::size_t i = 0; i < visible_; ++i) {
    const RungRow* const from = row_of(room.source[i]);
    (from ? from->rows : rows).logits(query, head, visible().subspan(i, 1), room.row.data() + i);
  }
  take_own_row(head, room);
}

/// Adds the values of the tokens in `from`'s row, times their exponentials, to out [heads][dim].
void FeedbackRun::add_values_of(const RungRow* from, GatherRoom& room, float* out) const {
  const std::size_t dim = view_.head_size, quads = (view_.group + kQuad - 1) / kQuad;
  for (std::uint32_t quad = 0; quad < quads; ++quad) {
    const float* const kept = room.kept.data() + quad * room.mass.size() * kQuad;
    room.picked.clear();
    room.weights.resize(room.mass.size() * kQuad);
    for (std::size_t i = 0; i < visible_; ++i) {
      if (row_of(room.source[i]) != from) continue;
      std::copy_n(kept + i * kQuad, kQuad, room.weights.data() + room.picked.size() * kQuad);
      room.picked.push_back(cache_.positions()[i]);
    }
    row_loops().accumulate(room.weights.data(), room.picked.data(), room.picked.size(),
                           view_.heads_in(quad), from ? from->values.data() : view_.v,
                           from ? dim : view_.kv_token_stride, dim, out + quad * kQuad * dim);
  }
}

void FeedbackRun::take_coded_outputs(const GroupRows& rows, GatherRoom& room) const {
  const std::size_t dim = view_.head_size, size = rows.heads() * dim;
  std::vector<float> coded(size);
  room.outputs.assign(size, 0.0f);
  add_values_of(nullptr, room, room.outputs.data());
  for (std::size_t rung = 0; rung < rungs_.size(); ++rung)
    if (rungs_[rung] && (rung == 0 || rungs_[rung] != rungs_[rung - 1]))
      add_values_of(rungs_[rung], room, coded.data());
  butterflies(coded);
  for (std::size_t d = 0; d < size; ++d) room.outputs[d] += coded[d] / kCodeBlock;
}

/// The outputs of the heads that were taken from their own maxima, from gathered exponentials.
void FeedbackRun::take_own_outputs(GatherRoom& room) const {
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    if (!room.lost[head]) continue;
    for (std::size_t i = 0; i < visible_; ++i)
      room.row[i] = room.kept[kept_index(i, head, room.mass.size())];
    float* const out = room.outputs.data() + head * std::size_t{view_.head_size};
    std::fill(out, out + view_.head_size, 0.0f);
    accumulate_rows(std::span(room.row).first(visible_), visible(), view_.v, view_.kv_token_stride,
                    view_.head_size, out);
  }
}

/// The changes of a query and the errors of a sampled one, from room.outputs and room.sum; without
/// a room its outputs are the full cache's.
void FeedbackRun::measure_outputs(std::uint32_t query, GroupRows& rows, GatherRoom* room) {
  const std::size_t dim = view_.head_size;
  if (room && rows.draws() > 0) {
    room->factors.resize(view_.group);
    for (std::uint32_t head = 0; head < view_.group; ++head)
      room->factors[head] = 1 / room->sum[head];
    rows.add_changes(query, room->outputs.data(), room->factors.data(),
                     measure_.changes(0, rows.draws()));
  }
  if (!measure_.samples(query)) return;
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    const float* const full = rows.outputs(query) + head * dim;
    const float* const kept = room ? room->outputs.data() + head * dim : nullptr;
    const float factor = room ? 1 / room->sum[head] : 1;
    const double error = room ? row_loops().distance2(full, kept, factor, dim) : 0;
    measure_.add_output(0, head, error, rows.norms2(query)[head], full, kept, factor);
  }
}

void FeedbackRun::observe_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  if (!observes(query)) return;
  if (needs_mass(cache_.needs())) take_masses(query, rows, room);
  if (needs_requests(cache_.needs())) take_requests(query, rows, room);
}

/// Probabilities from logits at squeezed positions; recall and misses from the full cache's rows.
void FeedbackRun::see_squeezed(std::uint32_t query, GroupRows& rows, GroupRows& unrounded,
                               const PlaceTable& places, GatherRoom& room) {
  room.resize(visible_, rows.heads());
  const bool outputs = measure_.measures(query) && takes_outputs(query, rows),
             whole = has_whole_row(query);
  if (whole)
    take_whole(query, unrounded, room);
  else if (observes(query) || outputs)
    take_squeezed(query, unrounded, places, room);
  if (whole)
    observe_all(query, unrounded);
  else
    observe_kept(query, rows, room);
  if (!measure_.measures(query)) return;
  if (!whole) add_shared(query, rows, room);
  measure(query, rows, room.shared.data());
  if (!outputs) return;
  take_squeezed_outputs(query, unrounded, room);
  measure_outputs(query, rows, &room);
}

/// A row of unrounded logits, nothing of which is the run's own.
void FeedbackRun::take_whole(std::uint32_t query, const GroupRows& unrounded,
                             GatherRoom& room) const {
  room.sum.assign(unrounded.sums(query), unrounded.sums(query) + unrounded.heads());
}

/// The values of the oldest tokens with the run's own exponentials; of the youngest, which follow
/// one another, with those that all share.
void FeedbackRun::take_squeezed_outputs(std::uint32_t query, GroupRows& unrounded,
                                        GatherRoom& room) const {
  const std::size_t dim = view_.head_size, old = old_keys_.size();
  room.outputs.assign(unrounded.heads() * dim, 0.0f);
  for (std::uint32_t quad = 0; quad < unrounded.quads(); ++quad)
    row_loops().accumulate(room.kept.data() + quad * room.mass.size() * kQuad,
                           cache_.positions().data(), old, view_.heads_in(quad), view_.v,
                           view_.kv_token_stride, dim, room.outputs.data() + quad * kQuad * dim);
  const float* const young = unrounded.values_from(query, cache_.positions()[old]);
  for (std::size_t d = 0; d < room.outputs.size(); ++d) room.outputs[d] += young[d];
  take_own_outputs(room);
}

/// Sums of the full cache's exponentials over the live set, [heads], no larger than the row's. From
/// old_keys_ on live tokens follow one another.
void FeedbackRun::add_shared(std::uint32_t query, GroupRows& rows, GatherRoom& room) const {
  const auto live = visible();
  const std::size_t old = old_keys_.size();
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    float scattered[kQuad];
    std::uint32_t unused[kQuad] = {};
    row_loops().total(rows.e(query, quad), live.data(), old, room.least.data(), scattered, unused);
    const auto following = rows.sums_from(query, quad, live[old]);
    for (std::size_t h = 0; h < kQuad; ++h)
      room.shared[quad * kQuad + h] = std::min(static_cast<float>(following[h]) + scattered[h],
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

/// Gathers one head's exponentials from its own maximum; room.products holds those of the old keys.
void FeedbackRun::take_own_squeezed(std::uint32_t query, std::uint32_t head,
                                    const GroupRows& unrounded, GatherRoom& room) {
  const std::size_t old = old_keys_.size(), stride = room.mass.size() + kPanelTokens;
  std::copy_n(room.products.data() + head % kQuad * stride, old, room.row.data());
  scale(room.row.data(), old, unrounded.softmax_scale());
  unrounded.logits(query, head, visible().subspan(old), room.row.data() + old);
  take_own_row(head, room);
}

/// The row of a head whose shared exponentials lost their bits, from its own maximum.
void FeedbackRun::take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows,
                                   GatherRoom& room) {
  rows.logits(query, head, visible(), room.row.data());
  take_own_row(head, room);
}

/// A head's gathered exponentials from the logits in room.row.
void FeedbackRun::take_own_row(std::uint32_t head, GatherRoom& room) const {
  room.lost[head] = true;
  shared_exponentials(room.row.data(), visible_, room.row.data());
  room.sum[head] = lane_sum(room.row.data(), visible_);
  room.most[head] = *std::max_element(room.row.begin(), room.row.begin() + visible_);
  for (std::size_t i = 0; i < visible_; ++i)
    room.kept[kept_index(i, head, room.mass.size())] = room.row[i];
}

void FeedbackRun::take_masses(std::uint32_t query, GroupRows& rows, GatherRoom& room) {
  const float weight = weight_of(query);
  if (weight != 1.0f || by_largest()) {
    std::fill(room.mass.begin(), room.mass.begin() + visible_, std::uint64_t{0});
    for (std::uint32_t head = 0; head < rows.group(); ++head)
      for (std::size_t i = 0; i < visible_; ++i) {
        const std::uint64_t mass =
            fixed_mass(weight, room.kept[kept_index(i, head, room.mass.size())] / room.sum[head]);
        room.mass[i] = by_largest() ? std::max(room.mass[i], mass) : room.mass[i] + mass;
      }
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
  measure_.begin_query(query);
  const bool all = visible_ == query + 1;
  const std::uint64_t* const bits = all ? nullptr : rows.request_bits(query);
  const std::size_t begins[] = {0, visible_};
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    const double sum = rows.sums(query)[head], recall = all ? 1.0 : shared[head] / sum;
    const std::uint64_t hits =
        all ? wanted.count[head]
            : row_loops().common(bits + head * rows.words(), cache_.live_bits(), query / 64 + 1);
    measure_.add_wanted(head, wanted.count[head]);
    measure_.add(0, head, recall, wanted.count[head] - static_cast<std::uint32_t>(hits));
    measure_.add_spans(head, rows.e(query, head / kQuad) + head % kQuad, kQuad, sum,
                       cache_.positions().data(), begins);
  }
}

RungRows::RungRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic) {
  check_coded_heads(view.head_size);
  view_.projection = nullptr;  // changes are of the full cache's rows
}

std::vector<RungRow*> RungRows::of(std::span<const RungSlots> ladder) {
  std::vector<RungRow*> by_rung;
  for (std::size_t rung = 0; rung < ladder.size(); ++rung) {
    const auto way = way_down(ladder, -1, static_cast<int>(rung));
    auto& row = rows_[way];
    if (!row && !way.empty()) row = code(way);
    by_rung.push_back(row.get());
  }
  return by_rung;
}

std::unique_ptr<RungRow> RungRows::code(const std::vector<const KvForm*>& way) const {
  const std::size_t dim = view_.head_size;
  std::vector<float> keys(view_.tokens * dim), values(keys.size());
  for (std::uint32_t token = 0; token < view_.tokens; ++token) {
    const std::span<float> key = std::span(keys).subspan(token * dim, dim),
                           value = std::span(values).subspan(token * dim, dim);
    take_token(view_, rope_, arithmetic_, token, key, value);
    code_token(way, key, value);
  }
  return std::make_unique<RungRow>(
      RungRow{GroupRows(view_, rope_, arithmetic_, keys), std::move(values)});
}

void RungRows::compute(std::uint32_t first, std::uint32_t count) {
  for (const auto& [way, row] : rows_)
    if (row) row->rows.compute(first, count);
}

}  // namespace kvlab
