#include "engine/cache/head_cache.hpp"

#include <algorithm>
#include <utility>

#include "traces/base/numeric/code.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kFewRows = 64;  // not worth compacting

}  // namespace

HeadCache::HeadCache(const HeadShape& shape, LiveSet live, OutputWeights output,
                     BroughtColumns brought)
    : shape_(shape),
      live_(std::move(live)),
      columns_(live_.columns(), shape.head_size, output),
      brought_(std::move(brought)),
      keys_(0, shape.head_size) {
  if (live_.has_codes()) check_coded_heads(shape.head_size);
}

HeadCache::HeadCache(const HeadCache& other)
    : shape_(other.shape_),
      live_(other.live_),
      columns_(other.columns_),
      brought_(other.brought_),
      keys_(other.keys_),
      values_(other.values_),
      plain_keys_(other.plain_keys_),
      rotated_to_(other.rotated_to_),
      rungs_(other.rungs_),
      old_(other.old_) {
  // A vector's copy has no room to spare, and keys and values have the same.
  values_.reserve(other.values_.capacity());
  plain_keys_.reserve(other.plain_keys_.capacity());
}

std::span<const std::uint32_t> HeadCache::make_room(std::uint32_t now) {
  const std::vector<std::uint32_t> before(live_.positions().begin(), live_.positions().end());
  std::vector<std::uint32_t> victims;
  for (const std::uint32_t age : live_.make_room(now)) victims.push_back(before[age]);
  victims_ = std::move(victims);
  step_down(0, live_.size());
  if (has_spare_rows()) compact();
  return victims_;
}

std::uint32_t HeadCache::first_visible(const HeadAdmission& admission, std::uint32_t token) const {
  const auto live = live_.positions();
  const std::uint32_t oldest = first_seen(shape_.span, admission.first + token);
  return static_cast<std::uint32_t>(std::ranges::lower_bound(live, oldest) - live.begin());
}

/// After a prompt none is spared, but for the next token's; otherwise rows that have been needed
/// are needed again.
bool HeadCache::has_spare_rows() const {
  const std::uint32_t rows = live_.slot_count(), live = live_.size();
  return live_.after_prompt() ? rows > live + 1 : rows > kFewRows && live < rows / 2;
}

/// After a long prompt few tokens are left, all over the rows: moves them together.
void HeadCache::compact() {
  const std::size_t dim = shape_.head_size;
  const std::vector<std::uint32_t> from = live_.renumber();
  const Panels keys = std::exchange(keys_, Panels(0, dim));
  const auto values = std::exchange(values_, {}), plain_keys = std::exchange(plain_keys_, {});
  const auto rotated_to = std::exchange(rotated_to_, {});
  const auto rungs = std::exchange(rungs_, {});
  seen_ = {};
  grow_to(from.size() + 1);
  std::vector<float> key(dim);
  for (std::size_t row = 0; row < from.size(); ++row) {
    keys.get_row(from[row], key.data());
    keys_.set_row(row, key.data());
    std::copy_n(&values[from[row] * dim], dim, &values_[row * dim]);
    if (live_.has_codes()) rungs_[row] = rungs[from[row]];
    if (shape_.positions != Positions::cache) continue;
    std::copy_n(&plain_keys[from[row] * dim], dim, &plain_keys_[row * dim]);
    rotated_to_[row] = rotated_to[from[row]];
  }
}

/// Where there is no room, makes some for half as many rows again, if the budget wants them.
void HeadCache::grow_to(std::size_t rows) {
  const std::size_t dim = shape_.head_size, had = values_.capacity() / dim;
  if (rows > had) {
    const std::uint64_t wanted = std::min<std::uint64_t>(had + had / 2, live_.capacity());
    const std::size_t room = std::max<std::size_t>(rows, wanted);
    keys_.reserve(room);
    values_.reserve(room * dim);
    if (shape_.positions == Positions::cache) plain_keys_.reserve(room * dim);
  }
  keys_.grow(rows);
  values_.resize(rows * dim);
  if (live_.has_codes()) rungs_.resize(rows);
  if (shape_.positions != Positions::cache) return;
  plain_keys_.resize(rows * dim);
  rotated_to_.resize(rows);
}

void HeadCache::admit(const HeadAdmission& admission, const RopeTable& rope) {
  KeyValueRows rows{admission.k, admission.v, admission.key_stride, admission.tokens};
  rows.q = admission.q, rows.group = shape_.group;
  rows.q_head_stride = shape_.head_size, rows.q_stride = admission.query_stride;
  rows.inv_freq = rope.rope().inv_freq, rows.rope_factor = rope.rope().factor;
  rows.softmax_scale = shape_.softmax_scale;
  const std::size_t end = std::size_t{admission.first} + admission.tokens;
  for (auto& [name, column] : brought_) column.resize(std::max(column.size(), end));
  live_.admit(admission.first, admission.tokens, columns_.admit(rows, &brought_, admission.first));
  grow_to(live_.slot_count());
  store(admission, rope);
  if (shape_.positions == Positions::cache) squeeze(rope);
  if (admission.tokens == 1) step_down(live_.size() - 1, live_.size());
  seen_ = Tally(live_, shape_.threshold16, live_.size());
  seen_.set_queries(admission.tokens);
}

void HeadCache::store(const HeadAdmission& admission, const RopeTable& rope) {
  const std::size_t dim = shape_.head_size;
  const std::span rows = live_.slots().last(admission.tokens);
  std::vector<float> rotated(dim);
  for (std::uint32_t i = 0; i < admission.tokens; ++i) {
    const float* key = admission.k + i * admission.key_stride;
    const float* value = admission.v + i * admission.key_stride;
    rope.rotate(key, dim, admission.first + i, rotated.data());
    keys_.set_row(rows[i], rotated.data());
    std::copy_n(value, dim, &values_[rows[i] * dim]);
    if (live_.has_codes()) rungs_[rows[i]] = -1;
    if (shape_.positions == Positions::cache) {
      std::copy_n(key, dim, &plain_keys_[rows[i] * dim]);
      rotated_to_[rows[i]] = admission.first + i;
    }
  }
}

/// Only differences of positions count. Tokens that have lost no younger one stay where they are;
/// the older ones are numbered by age, and rotated again, from their plain selves, when one that is
/// older yet has left.
void HeadCache::squeeze(const RopeTable& rope) {
  const std::size_t dim = shape_.head_size;
  old_ = tokens_before_gaps(live_.positions());
  std::vector<float> rotated(dim);
  for (std::uint32_t age = 0; age < live_.size(); ++age) {
    const std::uint32_t row = live_.slots()[age], place = age < old_ ? age : live_.positions()[age];
    if (rotated_to_[row] == place) continue;
    rotated_to_[row] = place;
    rope.rotate(&plain_keys_[row * dim], dim, place, rotated.data());
    keys_.set_row(row, rotated.data());
  }
}

void HeadCache::step_down(std::uint32_t first, std::uint32_t last) {
  if (!live_.has_codes()) return;
  const std::size_t dim = shape_.head_size;
  std::vector<float> key(dim);
  for (std::uint32_t age = first; age < last; ++age) {
    const std::uint32_t row = live_.slots()[age];
    const auto forms = way_down(live_.ladder(), rungs_[row], static_cast<int>(live_.rung(age)));
    const bool was_coded = is_coded(row);
    rungs_[row] = static_cast<int>(live_.rung(age));
    if (forms.empty()) continue;
    const std::span<float> value = std::span(values_).subspan(row * dim, dim);
    keys_.get_row(row, key.data());
    if (!was_coded) butterflies(key), butterflies(value);
    for (const KvForm* form : forms) {
      code_row(key, form->key_bits, form->floating);
      code_row(value, form->value_bits, form->floating);
    }
    keys_.set_row(row, key.data());
  }
}

/// Products of the queries with the keys of all rows: [query, head, row].
void HeadCache::multiply_at(const HeadAdmission& admission, std::uint32_t begin, std::uint32_t end,
                            Turned turned, std::size_t panels, const RopeTable& rope,
                            std::vector<float>& by_row) const {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> rotated(queries * dim);
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    rope.rotate(
        admission.q + token * admission.query_stride + i % group * dim, dim,
        turned == Turned::to_number ? visible(admission, token) - 1 : admission.first + token,
        &rotated[i * dim]);
  }
  if (turned == Turned::behind_butterflies) butterflies(rotated);
  by_row.resize(queries * stride);
  multiply_fused(rotated.data(), queries, dim, keys_, 0, panels, by_row.data(), stride);
}

void HeadCache::attend(const HeadAdmission& admission, std::uint32_t begin, std::uint32_t end,
                       const RopeTable& rope) {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::span rows = live_.slots().first(visible(admission, end - 1));
  const std::size_t panels = *std::max_element(rows.begin(), rows.end()) / 16 + 1;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> by_row, by_row_of_old, by_row_of_codes, by_age(rows.size());
  multiply_at(admission, begin, end, Turned::to_position, panels, rope, by_row);
  if (old_ > 0) multiply_at(admission, begin, end, Turned::to_number, panels, rope, by_row_of_old);
  if (live_.has_codes())
    multiply_at(admission, begin, end, Turned::behind_butterflies, panels, rope, by_row_of_codes);

  Tally received(live_, shape_.threshold16, static_cast<std::uint32_t>(rows.size()));
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    const std::uint32_t first = first_visible(admission, token);
    const std::size_t head = i % group, count = visible(admission, token) - first;
    const std::span seen = rows.subspan(first, count);
    float* p = by_age.data();
    for (std::size_t age = 0; age < count; ++age)
      p[age] = (first + age < old_ ? by_row_of_old : by_row)[i * stride + seen[age]];
    for (std::size_t age = 0; live_.has_codes() && age < count; ++age)
      if (is_coded(seen[age])) p[age] = by_row_of_codes[i * stride + seen[age]] / kCodeBlock;
    make_scores(p, count, shape_.softmax_scale, shape_.softcap);
    const float* sink = shape_.sinks.empty() ? nullptr : &shape_.sinks[head];
    const RowSum all = row_exponentials(p, count, sink, p);
    divide(p, count, all.sum, p);
    admission.lse[token * admission.lse_stride + head] =
        static_cast<float>(log_sum_exp(all.shift, static_cast<double>(all.sum)));
    float* out = admission.out + token * admission.query_stride + head * dim;
    std::fill_n(out, dim, 0.0f);
    accumulate({p, count}, seen, out);
    received.add_row({p, count}, admission.tokens - 1 - token);
    if (head + 1 == group) received.end_query(admission.first + token);
  }
  const std::lock_guard lock(seen_mutex_);
  seen_.merge(received);
}

void HeadCache::accumulate(std::span<const float> p, std::span<const std::uint32_t> rows,
                           float* out) const {
  const std::size_t dim = shape_.head_size;
  const auto coded = [&](std::uint32_t row) { return is_coded(row); };
  if (!live_.has_codes() || std::ranges::none_of(rows, coded))
    return accumulate_rows(p, rows, values_.data(), dim, dim, out);
  std::vector<std::uint32_t> rows_of[2];  // exact, coded
  std::vector<float> p_of[2], sum(dim);
  for (std::size_t age = 0; age < rows.size(); ++age) {
    rows_of[coded(rows[age])].push_back(rows[age]);
    p_of[coded(rows[age])].push_back(p[age]);
  }
  if (!rows_of[0].empty()) accumulate_rows(p_of[0], rows_of[0], values_.data(), dim, dim, out);
  accumulate_rows(p_of[1], rows_of[1], values_.data(), dim, dim, sum.data());
  butterflies(sum);
  for (std::size_t d = 0; d < dim; ++d) out[d] += sum[d] / kCodeBlock;
}

std::span<const Observation> HeadCache::observe() {
  live_.observe(seen_.seen(), seen_.heads());
  return seen_.seen();
}

}  // namespace kvlab
