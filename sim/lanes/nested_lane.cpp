#include "sim/lanes/nested_lane.hpp"

#include <algorithm>
#include <numeric>

#include "traces/numeric/softmax.hpp"

namespace kvlab {

NestedLane::NestedLane(std::vector<LaneConfig> configs, std::unique_ptr<NestedOrder> order,
                       const HeadView& view, const QuerySpan* span)
    : order_(std::move(order)),
      guards_(configs.front().guards),
      view_(view),
      span_(span),
      cursor_(*configs.front().admissions) {
  for (const LaneConfig& config : configs) {
    levels_.push_back({.budget = config.budget, .tokens = {}, .stats = {}});
    if (span) levels_.back().stats.resize(*span, view.group);
  }
}

bool NestedLane::wants_row(std::uint32_t query) const {
  return order_->wants_rows() || (span_ && span_->contains(query));
}

void NestedLane::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  for (std::uint32_t query = first; query < first + count; ++query) attend_query(query, rows);
}

void NestedLane::attend_query(std::uint32_t query, GroupRows& rows) {
  if (cursor_.begins_at(query)) begin_admission(cursor_.current());
  unseen_ = cursor_.age_of(query);
  if (span_ && span_->contains(query)) measure(query, rows);
  if (watcher_) show(query);
  order_->spend(query, rows);
  if (cursor_.ends_at(query)) cursor_.advance();
}

void NestedLane::begin_admission(const Admission& admission) {
  make_room(admission.first);
  order_->admit(admission.first, admission.tokens);
  for (std::uint32_t i = 0; i < admission.tokens; ++i)
    levels_.front().tokens.push_back(admission.first + i);
  std::uint64_t live = 0;
  for (Level& level : levels_) {
    live += level.tokens.size();
    level.live_max = std::max(level.live_max, live);
  }
}

/// A victim of one budget is still live at the next one, and a token that a smaller budget keeps
/// outranks as many others at a larger one: only what the level itself holds, with what has dropped
/// to it, may leave.
void NestedLane::make_room(std::uint32_t now) {
  carried_.clear();
  std::size_t kept = 0;  // at smaller budgets
  for (Level& level : levels_) {
    level.tokens.insert(level.tokens.end(), carried_.begin(), carried_.end());
    carried_.clear();
    const std::size_t allowed =
        level.budget == kNoBudget ? level.tokens.size() : level.budget - 1 - kept;
    if (level.tokens.size() > allowed) drop(level.tokens, level.tokens.size() - allowed, now);
    level.evictions += carried_.size();
    kept += level.tokens.size();
  }
}

/// Moves the tokens that leave first from `pool` to carried_.
void NestedLane::drop(std::vector<std::uint32_t>& pool, std::size_t leaving, std::uint32_t now) {
  ranks_.resize(pool.size());
  order_->rank(pool, now, ranks_);
  const auto key = [&](std::size_t i) {
    return LeavingKey{guards_.guard(pool[i], now), ranks_[i], pool[i]};
  };
  if (leaving == 1) {
    std::size_t first = 0;
    LeavingKey least = key(0);
    for (std::size_t i = 1; i < pool.size(); ++i)
      if (const LeavingKey other = key(i); other < least) least = other, first = i;
    carried_.push_back(pool[first]);
    pool[first] = pool.back();
    pool.pop_back();
    return;
  }
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(leaving) - 1,
                   order.end(), [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  std::vector<std::uint32_t> staying;
  for (std::size_t i = 0; i < order.size(); ++i)
    (i < leaving ? carried_ : staying).push_back(pool[order[i]]);
  std::sort(staying.begin(), staying.end());
  pool = std::move(staying);
}

/// The tokens of a level that the current query may see: the admission's youngest lie at the end of
/// the first.
std::span<const std::uint32_t> NestedLane::visible(std::size_t level) const {
  const auto& tokens = levels_[level].tokens;
  return {tokens.data(), tokens.size() - (level == 0 ? unseen_ : 0)};
}

void NestedLane::measure(std::uint32_t query, GroupRows& rows) {
  const std::uint32_t heads = rows.heads(), block = span_->block(query);
  const GroupRows::Requests wanted = rows.requests(query);
  std::vector<std::uint32_t> hits(heads);
  std::vector<double> running(heads);
  sums_.resize(levels_.size() * heads);
  std::size_t live = 0;
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const auto tokens = visible(l);
    live += tokens.size();
    const bool all = live == query + 1;
    for (std::uint32_t quad = 0; quad < rows.quads() && !tokens.empty(); ++quad) {
      float sum[kQuad];
      row_loops().total(rows.e(query, quad), tokens.data(), tokens.size(),
                        wanted.least + quad * kQuad, sum, hits.data() + quad * kQuad);
      for (std::size_t h = 0; h < kQuad; ++h)
        running[quad * kQuad + h] += static_cast<double>(sum[h]);
    }
    HeadStats& stats = levels_[l].stats;
    for (std::uint32_t h = 0; h < rows.group(); ++h) {
      const float full = rows.sums(query)[h];
      sums_[l * heads + h] = all ? full : static_cast<float>(running[h]);
      stats.add_recall(block, h, all ? 1.0 : std::min(1.0, running[h] / static_cast<double>(full)));
      // The query's own token is live, and it is not in N.
      const bool own = rows.e(query, h / kQuad)[query * kQuad + h % kQuad] >= wanted.least[h];
      const std::uint32_t found = hits[h] - (own ? 1 : 0);
      stats.heads[h].miss.add(block, wanted.count[h] - found, wanted.count[h]);
    }
  }
  if (span_->sampled(query)) measure_outputs(query, rows);
}

void NestedLane::measure_outputs(std::uint32_t query, GroupRows& rows) {
  outputs_.assign(rows.heads() * view_.head_size, 0.0f);
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    add_to_outputs(query, visible(l), rows);
    measure_level(query, l, rows);
  }
}

void NestedLane::add_to_outputs(std::uint32_t query, std::span<const std::uint32_t> tokens,
                                const GroupRows& rows) {
  weights_.resize(tokens.size() * kQuad);
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    const float* const e = rows.e(query, quad);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      std::copy_n(e + tokens[i] * kQuad, kQuad, weights_.data() + i * kQuad);
    row_loops().accumulate(weights_.data(), tokens.data(), tokens.size(), view_.v,
                           view_.kv_token_stride, view_.head_size,
                           outputs_.data() + quad * kQuad * view_.head_size);
  }
}

void NestedLane::measure_level(std::uint32_t query, std::size_t level, GroupRows& rows) {
  const std::size_t dim = view_.head_size;
  const float* const full = rows.outputs(query);
  std::size_t live = 0;
  for (std::size_t l = 0; l <= level; ++l) live += visible(l).size();
  std::vector<float> kept(dim);
  for (std::uint32_t h = 0; h < rows.group(); ++h) {
    const float sum = sums_[level * rows.heads() + h];
    if (live == query + 1)
      std::copy_n(full + h * dim, dim, kept.data());
    else if (sum < kSharedSumFloor)
      kept = own_output(query, level, h, rows);
    else
      divide(outputs_.data() + h * dim, dim, sum, kept.data());
    levels_[level].stats.add_outputs(*span_, query, h, {full + h * dim, dim}, kept);
  }
}

/// The output of a live set whose shared exponentials lost their bits, from its own maximum.
std::vector<float> NestedLane::own_output(std::uint32_t query, std::size_t level,
                                          std::uint32_t head, const GroupRows& rows) const {
  const std::vector<std::uint32_t> tokens = live(level);
  std::vector<float> p(tokens.size()), out(view_.head_size);
  rows.logits(query, head, tokens, p.data());
  shared_exponentials(p.data(), p.size(), p.data());
  divide(p.data(), p.size(), lane_sum(p.data(), p.size()), p.data());
  accumulate_rows(p, tokens, view_.v, view_.kv_token_stride, view_.head_size, out.data());
  return out;
}

/// By age.
std::vector<std::uint32_t> NestedLane::live(std::size_t level) const {
  std::vector<std::uint32_t> tokens;
  for (std::size_t l = 0; l <= level; ++l)
    tokens.insert(tokens.end(), visible(l).begin(), visible(l).end());
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

void NestedLane::show(std::uint32_t query) {
  for (std::size_t l = 0; l < levels_.size(); ++l) watcher_(l, query, live(l));
}

std::vector<LaneOutcome> NestedLane::outcomes() {
  std::vector<LaneOutcome> all;
  std::uint64_t live = 0;
  for (Level& level : levels_) {
    live += level.tokens.size();
    all.push_back({std::move(level.stats), level.evictions, level.live_max, live});
  }
  return all;
}

}  // namespace kvlab
