#include "sim/head_run.hpp"

#include <algorithm>

#include "policies/observation.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {
CachePositionKeys::CachePositionKeys(const HeadView& view, const RopeTable& rope,
                                     const HeadArithmetic& arithmetic)
    : view_(view),
      rope_(rope),
      arithmetic_(arithmetic),
      keys_(0, view.head_size),
      queries_(std::size_t{view.group} * view.head_size) {}

void CachePositionKeys::update(const LiveSet& live) {
  keys_.grow(live.slot_count());
  rotated_to_.resize(live.slot_count(), kNoBudget);
  tokens_.resize(live.slot_count(), kNoBudget);
  const auto positions = live.positions();
  const auto slots = live.slots();
  old_ = tokens_before_gaps(positions);
  std::vector<float> key(view_.head_size);
  for (std::uint32_t i = 0; i < live.size(); ++i) {
    const std::uint32_t slot = slots[i], position_in_cache = i < old_ ? i : positions[i];
    if (tokens_[slot] == positions[i] && rotated_to_[slot] == position_in_cache) continue;
    rope_.rotate(view_.key(positions[i]), view_.head_size, position_in_cache, key.data());
    keys_.set_row(slot, key.data());
    tokens_[slot] = positions[i];
    rotated_to_[slot] = position_in_cache;
  }
}

/// Multiplies the query's heads, rotated to `position_in_cache`, by the keys of all slots.
void CachePositionKeys::multiply_at(std::uint32_t query, std::uint32_t position_in_cache,
                                    std::vector<float>& by_slot) {
  for (std::uint32_t head = 0; head < view_.group; ++head)
    rope_.rotate(view_.query(head, query), view_.head_size, position_in_cache,
                 queries_.data() + head * view_.head_size);
  const std::size_t stride = keys_.panel_count() * 16;
  by_slot.resize(view_.group * stride);
  multiply_fused(queries_.data(), view_.group, view_.head_size, keys_, 0, keys_.panel_count(),
                 by_slot.data(), stride);
}

void CachePositionKeys::compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible) {
  multiply_at(query, query, by_position_);
  if (old_ > 0) multiply_at(query, visible - 1, by_number_);
  const std::size_t stride = keys_.panel_count() * 16;
  visible_ = visible;
  by_age_.resize(view_.group * visible_);
  const auto slots = live.slots();
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    float* to = by_age_.data() + head * visible_;
    for (std::uint32_t i = 0; i < visible; ++i)
      to[i] = (i < old_ ? by_number_ : by_position_)[head * stride + slots[i]];
    make_scores(to, visible_, arithmetic_.softmax_scale, arithmetic_.softcap);
  }
}

std::span<const float> CachePositionKeys::logits(std::uint32_t head) const {
  return {by_age_.data() + head * visible_, visible_};
}

HeadRun::HeadRun(LiveSet live, Positions positions, const std::vector<Append>& appends,
                 const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : live_(std::move(live)),
      appends_(appends),
      view_(view),
      arithmetic_(arithmetic),
      features_(live_.features(), view, appends),
      measure_(nullptr, 1, view),
      out_(view.head_size) {
  if (positions == Positions::cache) cache_positions_.emplace(view, rope, arithmetic);
  if (live_.is_quantized())
    quantized_ = kept_rows(*live_.tier_plan().front().format, view, rope, arithmetic);
}

bool HeadRun::observes(std::uint32_t query) const {
  if (live_.needs() == Needs::nothing) return false;
  return needs_requests(live_.needs()) || age_of(query) < live_.tail();
}

bool HeadRun::wants_row(std::uint32_t query) const {
  if (measure_.measures(query)) return true;
  if (cache_positions_) return false;
  // The tail of a later append is not known yet, and one row too many is harmless.
  return target_.out || live_.needs() != Needs::nothing;
}

void HeadRun::attend(std::uint32_t query, SharedRows& rows) {
  if (query == current_append().first) begin_append();
  visible_ = live_.size() - age_of(query);
  sees_all_ = visible_ == query + 1;

  if (observes(query) || measure_.measures(query) || target_.out) {
    if (cache_positions_) cache_positions_->compute(query, live_, visible_);
    if (quantized_) {
      const bool staged = current_append().tokens > 1;  // in 16 bit until their append ends
      quantized_->update(live_, visible_, staged ? current_append().first : kNoBudget);
      exact_ = quantized_->all_exact();
    }
    if (measure_.measures(query)) measure_.begin_query(query);
    for (std::uint32_t head = 0; head < view_.group; ++head) attend_head(query, head, rows);
    seen_.end_query(query);
  }
  if (watcher_) watcher_(query, live_.positions().first(visible_));
  if (query + 1 == current_append().first + current_append().tokens) finish_append();
}

void HeadRun::begin_append() {
  if (append_watcher_) append_watcher_(current_append().first, live_);
  live_.evict_to_budget(current_append().first);
  live_.append(current_append().first, current_append().tokens,
               features_.from(current_append().first));
  if (cache_positions_) cache_positions_->update(live_);
  seen_ = Tally(live_, arithmetic_.threshold16, live_.size());
}

void HeadRun::finish_append() {
  seen_.set_queries(current_append().tokens);
  live_.observe(seen_.observations(), seen_.heads());
  if (current_append().ends_prompt) live_.end_prompt();
  ++next_;
}

void HeadRun::attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows) {
  take_probabilities(query, head, rows);
  seen_.add_row(p_, age_of(query));
  if (measure_.measures(query)) measure_head(query, head, rows);
  if (target_.out) {
    const auto out = output();
    std::copy(out.begin(), out.end(),
              target_.out + query * target_.token_stride + head * target_.head_stride);
  }
}

/// Applies the softmax over the live tokens and the sink.
void HeadRun::divide_scores(const float* scores, std::uint32_t head) {
  const RowSum all = row_exponentials(scores, visible_, view_.sink(head), p_.data());
  divide(p_.data(), visible_, all.sum, p_.data());
}

void HeadRun::take_probabilities(std::uint32_t query, std::uint32_t head, SharedRows& rows) {
  p_.resize(visible_);
  if (cache_positions_ || !exact_) {
    if (!exact_) quantized_->logits(query, head, rows, p_.data());
    return divide_scores(exact_ ? cache_positions_->logits(head).data() : p_.data(), head);
  }
  const SharedRows::Row full = rows.row(query, head);
  if (sees_all_) return divide(full.e.data(), visible_, full.sum, p_.data());
  const auto live = live_.positions().first(visible_);
  for (std::uint32_t i = 0; i < visible_; ++i) p_[i] = full.e[live[i]];
  // In a layer with a window, all tokens that the query sees are live.
  if (arithmetic_.window > 0) return divide(p_.data(), visible_, full.sum, p_.data());
  const float sum = lane_sum(p_.data(), visible_);
  if (sum < kSharedSumFloor) {
    rows.logits(query, head, live, p_.data());
    return divide_scores(p_.data(), head);
  }
  divide(p_.data(), visible_, sum + full.sink, p_.data());
}

void HeadRun::measure_head(std::uint32_t query, std::uint32_t head, SharedRows& rows) {
  const SharedRows::Row full = rows.row(query, head);
  const auto live = live_.positions().first(visible_);
  double recall = 1;
  if (!sees_all_) {
    kept_.resize(visible_);
    for (std::uint32_t i = 0; i < visible_; ++i) kept_[i] = full.e[live[i]];
    const double kept = lane_sum(kept_.data(), visible_) + static_cast<double>(full.sink);
    recall = kept / static_cast<double>(full.sum);
  }
  const SharedRows::Requests wanted = rows.requests(query, head);
  std::uint32_t hits = 0;
  for (const std::uint32_t position : live)
    if (position < query) hits += wanted.flags[position];
  measure_.add_wanted(head, wanted.count);
  measure_.add(0, head, recall, wanted.count - hits);
  const std::size_t begins[] = {0, visible_};
  measure_.add_passages(head, full.e.data(), 1, full.sum, live.data(), begins);
  if (!measure_.samples(query) && rows.gradient_samples() == 0) return;
  const auto full_output = rows.output(query, head), own = output();
  measure_changes(query, head, full_output, own, rows);
  if (!measure_.samples(query)) return;
  double error = 0, size = 0;
  for (std::size_t d = 0; d < own.size(); ++d) {
    const double x = full_output[d], difference = x - own[d];
    error += difference * difference;
    size += x * x;
  }
  measure_.add_output(0, head, error, size, full_output.data(), own.data(), 1.0f);
  if (!exact_ && measure_.wants_quantization(query)) measure_quantization(query, head, rows);
}

/// Measures the output over the same tokens in 16 bit against out_.
void HeadRun::measure_quantization(std::uint32_t query, std::uint32_t head, SharedRows& rows) {
  const std::vector<float> p = p_, quantized = out_;
  exact_ = true;
  take_probabilities(query, head, rows);
  measure_.add_quantization(0, head, output().data(), quantized.data(), 1.0f);
  exact_ = false;
  p_ = p;
}

/// Adds how much the head's error changes the log-likelihood of each gradient sample.
void HeadRun::measure_changes(std::uint32_t query, std::uint32_t head, std::span<const float> full,
                              std::span<const float> own, SharedRows& rows) {
  for (std::uint32_t gradient_sample = 0; gradient_sample < rows.gradient_samples();
       ++gradient_sample) {
    const float* const gradient =
        rows.gradients(query) + (gradient_sample * view_.group + head) * full.size();
    double change = 0;
    for (std::size_t d = 0; d < full.size(); ++d)
      change += static_cast<double>(gradient[d]) *
                (static_cast<double>(own[d]) - static_cast<double>(full[d]));
    measure_.changes(0, rows.gradient_samples())[gradient_sample] += static_cast<float>(change);
  }
}

std::span<const float> HeadRun::output() {
  std::fill(out_.begin(), out_.end(), 0.0f);
  if (exact_)
    accumulate_rows(p_, live_.positions().first(visible_), view_.v, view_.kv_token_stride,
                    view_.head_size, out_.data());
  else
    quantized_->accumulate(p_, out_);
  return out_;
}

namespace {

bool anybody_wants(std::uint32_t first, std::uint32_t count,
                   std::span<const std::unique_ptr<HeadRun>> runs) {
  for (std::uint32_t query = first; query < first + count; ++query)
    for (const auto& run : runs)
      if (run->wants_row(query)) return true;
  return false;
}

}  // namespace

void run_head(QueryRange queries, SharedRows& rows,
              std::span<const std::unique_ptr<HeadRun>> runs) {
  for (std::uint32_t first = queries.begin; first < queries.end; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), queries.end - first);
    throw_if_cancelled();
    if (anybody_wants(first, count, runs)) rows.compute(first, count);
    for (const auto& run : runs)
      for (std::uint32_t query = first; query < first + count; ++query) run->attend(query, rows);
  }
}

void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs) {
  for (const LayerRun& run : runs) {
    std::vector<AgedSet*> caches;
    for (const auto& head : run) caches.push_back(&head->aged_set());
    share_ranks(caches);
  }
  const std::uint32_t block = rows.front().block_queries();
  for (std::uint32_t first = queries.begin; first < queries.end; first += block) {
    const std::uint32_t count = std::min(block, queries.end - first);
    throw_if_cancelled();
    if (std::ranges::any_of(runs, [&](auto& run) { return anybody_wants(first, count, run); }))
      for (SharedRows& head : rows) head.compute(first, count);
    for (const LayerRun& run : runs)
      for (std::uint32_t query = first; query < first + count; ++query)
        for (std::size_t head = 0; head < rows.size(); ++head) run[head]->attend(query, rows[head]);
  }
}

}  // namespace kvlab
