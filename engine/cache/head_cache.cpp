#include "engine/cache/head_cache.hpp"

#include <algorithm>
#include <utility>

#include "traces/base/numeric/quantize.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kFewRows = 64;  // not worth compacting

}  // namespace

HeadCache::HeadCache(const HeadShape& shape, LiveSet live, OutputWeights output,
                     FeaturesByName feature_values)
    : shape_(shape),
      live_(std::move(live)),
      features_(live_.features(), shape.head_size, output),
      feature_values_(std::move(feature_values)),
      keys_(0, shape.head_size) {
  if (live_.is_quantized()) check_quantized_heads(shape.head_size);
}

HeadCache::HeadCache(const HeadCache& other)
    : shape_(other.shape_),
      live_(other.live_),
      features_(other.features_),
      feature_values_(other.feature_values_),
      keys_(other.keys_),
      values_(other.values_),
      plain_keys_(other.plain_keys_),
      rotated_to_(other.rotated_to_),
      tiers_(other.tiers_),
      old_(other.old_) {
  // A copy of a vector has no spare capacity, but keys_ and the vectors must have the same.
  values_.reserve(other.values_.capacity());
  plain_keys_.reserve(other.plain_keys_.capacity());
}

std::span<const std::uint32_t> HeadCache::evict_to_budget(std::uint32_t now) {
  const std::vector<std::uint32_t> before(live_.positions().begin(), live_.positions().end());
  std::vector<std::uint32_t> victims;
  for (const std::uint32_t age : live_.evict_to_budget(now)) victims.push_back(before[age]);
  victims_ = std::move(victims);
  demote(0, live_.size());
  if (has_spare_rows()) compact();
  return victims_;
}

std::uint32_t HeadCache::first_visible(const HeadAppend& append, std::uint32_t token) const {
  const auto live = live_.positions();
  const std::uint32_t oldest = first_seen(shape_.window, append.first + token);
  return static_cast<std::uint32_t>(std::ranges::lower_bound(live, oldest) - live.begin());
}

/// Whether there are rows to free. After a prompt, all but the next token's are freed; at other
/// times, rows that have been needed are likely to be needed again.
bool HeadCache::has_spare_rows() const {
  const std::uint32_t rows = live_.slot_count(), live = live_.size();
  return live_.after_prompt() ? rows > live + 1 : rows > kFewRows && live < rows / 2;
}

/// Moves the live tokens to the first rows, because after a long prompt few are left, scattered
/// over all rows.
void HeadCache::compact() {
  const std::size_t dim = shape_.head_size;
  const std::vector<std::uint32_t> from = live_.renumber();
  const Panels keys = std::exchange(keys_, Panels(0, dim));
  const auto values = std::exchange(values_, {}), plain_keys = std::exchange(plain_keys_, {});
  const auto rotated_to = std::exchange(rotated_to_, {});
  const auto tiers = std::exchange(tiers_, {});
  seen_ = {};
  grow_to(from.size() + 1);
  std::vector<float> key(dim);
  for (std::size_t row = 0; row < from.size(); ++row) {
    keys.get_row(from[row], key.data());
    keys_.set_row(row, key.data());
    std::copy_n(&values[from[row] * dim], dim, &values_[row * dim]);
    if (live_.is_quantized()) tiers_[row] = tiers[from[row]];
    if (shape_.positions != Positions::cache) continue;
    std::copy_n(&plain_keys[from[row] * dim], dim, &plain_keys_[row * dim]);
    rotated_to_[row] = rotated_to[from[row]];
  }
}

/// Sets the number of rows. If the capacity is too small, it grows by half, if the budget needs as
/// many.
void HeadCache::grow_to(std::size_t rows) {
  const std::size_t dim = shape_.head_size, had = values_.capacity() / dim;
  if (rows > had) {
    const std::uint64_t wanted = std::min<std::uint64_t>(had + had / 2, live_.capacity());
    const std::size_t capacity = std::max<std::size_t>(rows, wanted);
    keys_.reserve(capacity);
    values_.reserve(capacity * dim);
    if (shape_.positions == Positions::cache) plain_keys_.reserve(capacity * dim);
  }
  keys_.grow(rows);
  values_.resize(rows * dim);
  if (live_.is_quantized()) tiers_.resize(rows);
  if (shape_.positions != Positions::cache) return;
  plain_keys_.resize(rows * dim);
  rotated_to_.resize(rows);
}

void HeadCache::append(const HeadAppend& append, const RopeTable& rope) {
  KeyValueRows rows{append.k, append.v, append.key_stride, append.tokens};
  rows.q = append.q, rows.group = shape_.group;
  rows.q_head_stride = shape_.head_size, rows.q_stride = append.query_stride;
  rows.inv_freq = rope.rope().inv_freq, rows.rope_factor = rope.rope().factor;
  rows.softmax_scale = shape_.softmax_scale;
  const std::size_t end = std::size_t{append.first} + append.tokens;
  for (auto& [name, feature] : feature_values_) feature.resize(std::max(feature.size(), end));
  live_.append(append.first, append.tokens, features_.append(rows, &feature_values_, append.first));
  grow_to(live_.slot_count());
  store(append, rope);
  if (shape_.positions == Positions::cache) rotate_to_cache_positions(rope);
  if (append.tokens == 1) demote(live_.size() - 1, live_.size());
  seen_ = Tally(live_, shape_.threshold16, live_.size());
  seen_.set_queries(append.tokens);
}

void HeadCache::store(const HeadAppend& append, const RopeTable& rope) {
  const std::size_t dim = shape_.head_size;
  const std::span rows = live_.slots().last(append.tokens);
  std::vector<float> rotated(dim);
  for (std::uint32_t i = 0; i < append.tokens; ++i) {
    const float* key = append.k + i * append.key_stride;
    const float* value = append.v + i * append.key_stride;
    rope.rotate(key, dim, append.first + i, rotated.data());
    keys_.set_row(rows[i], rotated.data());
    std::copy_n(value, dim, &values_[rows[i] * dim]);
    if (live_.is_quantized()) tiers_[rows[i]] = -1;
    if (shape_.positions == Positions::cache) {
      std::copy_n(key, dim, &plain_keys_[rows[i] * dim]);
      rotated_to_[rows[i]] = append.first + i;
    }
  }
}

/// Only differences of positions matter. Tokens that are younger than every evicted token keep
/// their original positions. The older ones are numbered by cache position, and are rotated again,
/// from their unrotated keys, when an even older one is evicted.
void HeadCache::rotate_to_cache_positions(const RopeTable& rope) {
  const std::size_t dim = shape_.head_size;
  old_ = tokens_before_gaps(live_.positions());
  std::vector<float> rotated(dim);
  for (std::uint32_t age = 0; age < live_.size(); ++age) {
    const std::uint32_t row = live_.slots()[age],
                        position_in_cache = age < old_ ? age : live_.positions()[age];
    if (rotated_to_[row] == position_in_cache) continue;
    rotated_to_[row] = position_in_cache;
    rope.rotate(&plain_keys_[row * dim], dim, position_in_cache, rotated.data());
    keys_.set_row(row, rotated.data());
  }
}

void HeadCache::demote(std::uint32_t first, std::uint32_t last) {
  if (!live_.is_quantized()) return;
  const std::size_t dim = shape_.head_size;
  std::vector<float> key(dim);
  for (std::uint32_t age = first; age < last; ++age) {
    const std::uint32_t row = live_.slots()[age];
    const auto formats =
        demotion_path(live_.tier_plan(), tiers_[row], static_cast<int>(live_.tier(age)));
    const bool was_quantized = is_quantized(row);
    tiers_[row] = static_cast<int>(live_.tier(age));
    if (formats.empty()) continue;
    const std::span<float> value = std::span(values_).subspan(row * dim, dim);
    keys_.get_row(row, key.data());
    if (!was_quantized) hadamard_rotate(key), hadamard_rotate(value);
    for (const KvFormat* format : formats) {
      quantize_row(key, format->key_bits, format->floating);
      quantize_row(value, format->value_bits, format->floating);
    }
    keys_.set_row(row, key.data());
  }
}

/// Multiplies the queries by the keys of all rows: [query, head, row].
void HeadCache::multiply_at(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
                            QueryRotation rotation, std::size_t panels, const RopeTable& rope,
                            std::vector<float>& by_row) const {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> rotated(queries * dim);
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    rope.rotate(
        append.q + token * append.query_stride + i % group * dim, dim,
        rotation == QueryRotation::to_number ? visible(append, token) - 1 : append.first + token,
        &rotated[i * dim]);
  }
  if (rotation == QueryRotation::hadamard_rotated) hadamard_rotate(rotated);
  by_row.resize(queries * stride);
  multiply_fused(rotated.data(), queries, dim, keys_, 0, panels, by_row.data(), stride);
}

void HeadCache::attend(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
                       const RopeTable& rope) {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::span rows = live_.slots().first(visible(append, end - 1));
  const std::size_t panels = *std::max_element(rows.begin(), rows.end()) / 16 + 1;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> by_row, by_row_of_old, by_row_of_quantized, by_age(rows.size());
  multiply_at(append, begin, end, QueryRotation::to_position, panels, rope, by_row);
  if (old_ > 0)
    multiply_at(append, begin, end, QueryRotation::to_number, panels, rope, by_row_of_old);
  if (live_.is_quantized())
    multiply_at(append, begin, end, QueryRotation::hadamard_rotated, panels, rope,
                by_row_of_quantized);

  Tally received(live_, shape_.threshold16, static_cast<std::uint32_t>(rows.size()));
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    const std::uint32_t first = first_visible(append, token);
    const std::size_t head = i % group, count = visible(append, token) - first;
    const std::span seen = rows.subspan(first, count);
    float* p = by_age.data();
    for (std::size_t age = 0; age < count; ++age)
      p[age] = (first + age < old_ ? by_row_of_old : by_row)[i * stride + seen[age]];
    for (std::size_t age = 0; live_.is_quantized() && age < count; ++age)
      if (is_quantized(seen[age]))
        p[age] = by_row_of_quantized[i * stride + seen[age]] / kQuantBlock;
    make_scores(p, count, shape_.softmax_scale, shape_.softcap);
    const float* sink = shape_.sinks.empty() ? nullptr : &shape_.sinks[head];
    const RowSum all = row_exponentials(p, count, sink, p);
    divide(p, count, all.sum, p);
    append.lse[token * append.lse_stride + head] =
        static_cast<float>(log_sum_exp(all.shift, static_cast<double>(all.sum)));
    float* out = append.out + token * append.query_stride + head * dim;
    std::fill_n(out, dim, 0.0f);
    accumulate({p, count}, seen, out);
    received.add_row({p, count}, append.tokens - 1 - token);
    if (head + 1 == group) received.end_query(append.first + token);
  }
  const std::lock_guard lock(seen_mutex_);
  seen_.merge(received);
}

void HeadCache::accumulate(std::span<const float> p, std::span<const std::uint32_t> rows,
                           float* out) const {
  const std::size_t dim = shape_.head_size;
  const auto quantized = [&](std::uint32_t row) { return is_quantized(row); };
  if (!live_.is_quantized() || std::ranges::none_of(rows, quantized))
    return accumulate_rows(p, rows, values_.data(), dim, dim, out);
  std::vector<std::uint32_t> rows_of[2];  // exact, quantized
  std::vector<float> p_of[2], sum(dim);
  for (std::size_t age = 0; age < rows.size(); ++age) {
    rows_of[quantized(rows[age])].push_back(rows[age]);
    p_of[quantized(rows[age])].push_back(p[age]);
  }
  if (!rows_of[0].empty()) accumulate_rows(p_of[0], rows_of[0], values_.data(), dim, dim, out);
  accumulate_rows(p_of[1], rows_of[1], values_.data(), dim, dim, sum.data());
  hadamard_rotate(sum);
  for (std::size_t d = 0; d < dim; ++d) out[d] += sum[d] / kQuantBlock;
}

std::span<const Observation> HeadCache::observe() {
  live_.observe(seen_.observations(), seen_.heads());
  return seen_.observations();
}

}  // namespace kvlab
