#include "sim/config_batches/nested/nested_config_batch.hpp"

#include <algorithm>
#include <numeric>

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

NestedConfigBatch::NestedConfigBatch(BatchedConfigs configs, std::unique_ptr<NestedOrder> order,
                                     const HeadView& view, const MeasuredQueries* measured)
    : order_(std::move(order)),
      oldest_first_(order_->oldest_first()),
      protected_tokens_(configs.front()->protected_tokens),
      view_(view),
      cursor_(configs.front()->appends),
      measure_(measured, configs.size(), view),
      begins_(configs.size() + 1) {
  for (const ResolvedConfig* config : configs) levels_.push_back({config->budget_tokens});
}

bool NestedConfigBatch::wants_row(std::uint32_t query) const {
  return order_->wants_rows() || measure_.measures(query);
}

void NestedConfigBatch::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  for (std::uint32_t query = first; query < first + count; ++query) attend_query(query, rows);
}

void NestedConfigBatch::attend_query(std::uint32_t query, GroupRows& rows) {
  if (cursor_.begins_at(query)) begin_append(cursor_.current());
  unseen_ = cursor_.age_of(query);
  if (measure_.measures(query)) measure(query, rows);
  if (watcher_) show(query);
  order_->spend(query, rows);
  if (cursor_.ends_at(query)) cursor_.advance();
}

// --- evictions -----------------------------------------------------------------------------------

void NestedConfigBatch::begin_append(const Append& append) {
  const std::size_t before = tokens_.size();
  order_->append(append.first, append.tokens);
  if (takes_one(append)) {
    evict_one_from_each_level(append.first);
    if (tokens_.size() == before) return;  // no level has grown
  } else {
    evict_to_budget(append.first);
    std::vector<std::uint32_t> entering(append.tokens);
    std::iota(entering.begin(), entering.end(), append.first);
    tokens_.insert(tokens_.begin() + static_cast<std::ptrdiff_t>(begins_[1]), entering.begin(),
                   entering.end());
    for (std::size_t l = 1; l < begins_.size(); ++l) begins_[l] += entering.size();
  }
  for (std::size_t l = 0; l < levels_.size(); ++l)
    levels_[l].live_max = std::max<std::uint64_t>(levels_[l].live_max, begins_[l + 1]);
}

/// Whether one token is appended and the first level then has to evict at most one token.
bool NestedConfigBatch::takes_one(const Append& append) const {
  return append.tokens == 1 && (levels_[0].budget == kNoBudget || begins_[1] <= levels_[0].budget);
}

/// Evicts one token from each full level. A victim of one budget is still live at the next larger
/// one. A token that a smaller budget keeps is never the victim of a larger one, so the victim is
/// one of the level's own tokens or the one that has dropped to it. The new token goes to the first
/// level.
void NestedConfigBatch::evict_one_from_each_level(std::uint32_t now) {
  if (begins_[1] < levels_[0].budget) {  // then no other level holds a token yet
    tokens_.push_back(now);
    for (std::size_t l = 1; l < begins_.size(); ++l) ++begins_[l];
    return;
  }
  if (!oldest_first_) {
    ranks_.resize(tokens_.size());
    order_->rank(tokens_, now, ranks_);
  }
  EvictionCandidate carried = exchange(0, now, nullptr);
  ++levels_[0].evictions;
  tokens_[begins_[1] - 1] = now;
  for (std::size_t l = 1; l < levels_.size(); ++l) {
    const std::size_t capacity = levels_[l].budget - levels_[l - 1].budget;
    if (begins_[l + 1] - begins_[l] < capacity) {  // then no later level holds a token yet
      const auto end = tokens_.end();
      tokens_.insert(std::lower_bound(tokens_.begin() + static_cast<std::ptrdiff_t>(begins_[l]),
                                      end, carried.position),
                     carried.position);
      for (std::size_t after = l + 1; after < begins_.size(); ++after) ++begins_[after];
      return;
    }
    carried = exchange(l, now, &carried);
    ++levels_[l].evictions;
  }
}

/// Removes the first victim from a level and inserts `comes` (null: nothing, so the level's last
/// index becomes free). The victim may be `comes` itself.
NestedConfigBatch::EvictionCandidate NestedConfigBatch::exchange(std::size_t level,
                                                                 std::uint32_t now,
                                                                 const EvictionCandidate* comes) {
  const std::size_t begin = begins_[level], end = begins_[level + 1];
  if (begin == end) return *comes;
  const std::size_t victim = find_victim(begin, end, now);
  const EvictionCandidate evicted{tokens_[victim],
                                  oldest_first_ ? tokens_[victim] : ranks_[victim]};
  const auto key = [&](const EvictionCandidate& token) {
    return EvictionKey{protected_tokens_.protection(token.position, now), token.rank,
                       token.position};
  };
  if (comes && key(*comes) < key(evicted)) return *comes;
  const auto at = [&](std::size_t i) { return tokens_.begin() + static_cast<std::ptrdiff_t>(i); };
  const auto index = comes ? std::lower_bound(at(begin), at(end), comes->position) : at(end);
  if (index > at(victim)) {
    std::move(at(victim + 1), index, at(victim));
    if (comes) *(index - 1) = comes->position;
  } else {
    std::move_backward(index, at(victim), at(victim + 1));
    *index = comes->position;
  }
  return evicted;
}

/// Tokens are ordered by age, so the sinks come first and the recent tokens last, and the first of
/// equal ranks is the oldest.
std::size_t NestedConfigBatch::find_victim(std::size_t begin, std::size_t end,
                                           std::uint32_t now) const {
  std::size_t first = begin, last = end;
  if (protected_tokens_.sinks > 0 || protected_tokens_.recent > 0) {
    const auto at = [&](std::size_t i) { return tokens_.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto sinks = std::partition_point(at(begin), at(end), [&](std::uint32_t position) {
      return position < protected_tokens_.sinks;
    });
    const auto recent = std::partition_point(sinks, at(end), [&](std::uint32_t position) {
      return protected_tokens_.protection(position, now) == 0;
    });
    first = static_cast<std::size_t>(sinks - tokens_.begin());
    last = static_cast<std::size_t>(recent - tokens_.begin());
    if (first == last && last < end)
      last = end;
    else if (first == last)
      first = begin;
  }
  return oldest_first_ ? first : row_loops().first_least(ranks_.data(), first, last);
}

/// Evicts any number of tokens, down to the budget.
void NestedConfigBatch::evict_to_budget(std::uint32_t now) {
  std::vector<std::uint32_t> tokens, carried, pool;
  std::vector<std::size_t> begins{0};
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    pool.assign(tokens_.begin() + static_cast<std::ptrdiff_t>(begins_[l]),
                tokens_.begin() + static_cast<std::ptrdiff_t>(begins_[l + 1]));
    pool.insert(pool.end(), carried.begin(), carried.end());
    std::sort(pool.begin(), pool.end());
    carried.clear();
    const std::size_t allowed =
        levels_[l].budget == kNoBudget ? pool.size() : levels_[l].budget - 1 - tokens.size();
    if (pool.size() > allowed) drop(pool, pool.size() - allowed, now, carried);
    levels_[l].evictions += carried.size();
    tokens.insert(tokens.end(), pool.begin(), pool.end());
    begins.push_back(tokens.size());
  }
  tokens_ = std::move(tokens);
  begins_ = std::move(begins);
}

/// Moves the tokens that are evicted first from `pool` to `carried`.
void NestedConfigBatch::drop(std::vector<std::uint32_t>& pool, std::size_t num_evicted,
                             std::uint32_t now, std::vector<std::uint32_t>& carried) {
  ranks_.resize(pool.size());
  order_->rank(pool, now, ranks_);
  const auto key = [&](std::size_t i) {
    return EvictionKey{protected_tokens_.protection(pool[i], now), ranks_[i], pool[i]};
  };
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(num_evicted) - 1,
                   order.end(), [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  std::vector<std::uint32_t> staying;
  for (std::size_t i = 0; i < order.size(); ++i)
    (i < num_evicted ? carried : staying).push_back(pool[order[i]]);
  std::sort(staying.begin(), staying.end());
  pool = std::move(staying);
}

// --- metrics -------------------------------------------------------------------------------------

void NestedConfigBatch::measure(std::uint32_t query, GroupRows& rows) {
  const std::size_t heads = rows.heads(), levels = levels_.size();
  const GroupRows::Requests wanted = rows.requests(query);
  running_.resize(levels * heads);
  hits_.resize(running_.size());
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().run_totals(rows.e(query, head_group), tokens_.data(), begins_.data(), levels,
                           unseen_, wanted.least + head_group * kHeadGroupSize, heads,
                           running_.data() + head_group * kHeadGroupSize,
                           hits_.data() + head_group * kHeadGroupSize);
  std::size_t whole = 0;  // the first level that has all tokens
  while (whole < levels && begins_[whole + 1] - unseen_ < query + std::size_t{1}) ++whole;
  measure_.begin_query(query);
  measure_recalls(query, whole, rows);
  if (!measure_.samples(query) && rows.gradient_samples() == 0) return;
  outputs_.assign(heads * view_.head_size, 0.0f);
  for (std::size_t l = 0; l < levels; ++l) {
    if (l >= whole && !measure_.samples(query)) break;
    add_level(query, l, rows);
    measure_outputs(query, l, whole, rows);
  }
}

/// From level `whole` on, sets hold the entire row.
void NestedConfigBatch::measure_recalls(std::uint32_t query, std::size_t whole, GroupRows& rows) {
  const GroupRows::Requests wanted = rows.requests(query);
  const std::uint32_t group = view_.group;
  inverse_.resize(group);
  due_.resize(group);
  for (std::uint32_t head = 0; head < group; ++head) {
    const float* const e = rows.e(query, head / kHeadGroupSize) + head % kHeadGroupSize;
    const double sum = rows.sums(query)[head];
    inverse_[head] = 1 / sum;
    // The query's own token is live, and it is not in N.
    due_[head] = wanted.count[head] + (e[query * kHeadGroupSize] >= wanted.least[head] ? 1 : 0);
    measure_.add_wanted(head, wanted.count[head]);
    measure_.add_passages(head, e, kHeadGroupSize, sum, tokens_.data(), begins_);
  }
  const std::size_t levels = levels_.size(), heads = rows.heads();
  for (std::size_t l = 0; l < levels; ++l)
    for (std::uint32_t head = 0; head < group; ++head) {
      const double recall = l < whole ? running_[l * heads + head] * inverse_[head] : 1;
      measure_.add(l, head, std::min(1.0, recall), due_[head] - hits_[l * heads + head]);
    }
}

/// Adds the values of a level's tokens to the outputs.
void NestedConfigBatch::add_level(std::uint32_t query, std::size_t level, const GroupRows& rows) {
  const std::uint32_t* const tokens = tokens_.data() + begin_of(level);
  const std::size_t count = end_of(level) - begin_of(level);
  weights_.resize(count * kHeadGroupSize);
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group) {
    const float* const e = rows.e(query, head_group);
    for (std::size_t i = 0; i < count; ++i)
      std::copy_n(e + std::size_t{tokens[i]} * kHeadGroupSize, kHeadGroupSize,
                  weights_.data() + i * kHeadGroupSize);
    row_loops().accumulate(weights_.data(), tokens, count, view_.heads_in(head_group), view_.v,
                           view_.kv_token_stride, view_.head_size,
                           outputs_.data() + head_group * kHeadGroupSize * view_.head_size);
  }
}

/// From level `whole` on, sets hold the entire row.
void NestedConfigBatch::measure_outputs(std::uint32_t query, std::size_t level, std::size_t whole,
                                        GroupRows& rows) {
  const std::size_t dim = view_.head_size;
  const float* const full = rows.outputs(query);
  const float* const kept = level < whole ? level_outputs(query, level, rows) : nullptr;
  if (kept && rows.gradient_samples() > 0)
    rows.add_changes(query, kept, factors_.data(),
                     measure_.changes(level, rows.gradient_samples()));
  if (!measure_.samples(query)) return;
  distances_.assign(view_.group, 0);
  if (kept)
    row_loops().quick_distances(full, kept, view_.group, factors_.data(), dim, distances_.data());
  for (std::uint32_t h = 0; h < view_.group; ++h)
    measure_.add_output(level, h, distances_[h], rows.norms2(query)[h], full + h * dim,
                        kept ? kept + h * dim : nullptr, kept ? factors_[h] : 1);
}

/// Returns the sums of values [heads][dim] of the levels up to `level`, valid until the next call.
/// factors_ converts them to outputs.
const float* NestedConfigBatch::level_outputs(std::uint32_t query, std::size_t level,
                                              const GroupRows& rows) {
  const float* sums = outputs_.data();
  factors_.resize(view_.group);
  for (std::uint32_t h = 0; h < view_.group; ++h) {
    const auto sum = static_cast<float>(running_[level * rows.heads() + h]);
    factors_[h] = 1 / sum;
    if (sum >= kSharedSumFloor) continue;
    if (sums == outputs_.data()) sums = (own_outputs_ = outputs_).data();
    std::ranges::copy(own_output(query, level, h, rows),
                      own_outputs_.begin() + static_cast<std::ptrdiff_t>(h * view_.head_size));
    factors_[h] = 1;
  }
  return sums;
}

/// Computes the output of a live set whose shared exponentials have lost bits, from its own
/// maximum.
std::vector<float> NestedConfigBatch::own_output(std::uint32_t query, std::size_t level,
                                                 std::uint32_t head, const GroupRows& rows) const {
  const std::vector<std::uint32_t> tokens = live(level);
  std::vector<float> p(tokens.size()), out(view_.head_size);
  rows.logits(query, head, tokens, p.data());
  shared_exponentials(p.data(), p.size(), p.data());
  divide(p.data(), p.size(), lane_sum(p.data(), p.size()), p.data());
  accumulate_rows(p, tokens, view_.v, view_.kv_token_stride, view_.head_size, out.data());
  return out;
}

/// The live tokens of a level's budget, by age.
std::vector<std::uint32_t> NestedConfigBatch::live(std::size_t level) const {
  std::vector<std::uint32_t> tokens;
  for (std::size_t l = 0; l <= level; ++l)
    tokens.insert(tokens.end(), tokens_.begin() + static_cast<std::ptrdiff_t>(begin_of(l)),
                  tokens_.begin() + static_cast<std::ptrdiff_t>(end_of(l)));
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

void NestedConfigBatch::show(std::uint32_t query) {
  for (std::size_t l = 0; l < levels_.size(); ++l) watcher_(l, query, live(l));
}

std::vector<HeadOutcome> NestedConfigBatch::outcomes() {
  std::vector<HeadOutcome> all;
  std::vector<HeadStats> stats = measure_.take();
  for (std::size_t l = 0; l < levels_.size(); ++l)
    all.push_back({std::move(stats[l]), levels_[l].evictions, levels_[l].live_max, begins_[l + 1]});
  return all;
}

}  // namespace kvlab
