#include "engine/cache/head_cache.hpp"

#include <algorithm>
#include <utility>

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kFewRows = 64;  // not worth compacting

}  // namespace

HeadCache::HeadCache(const HeadShape& shape, LiveSet live, OutputWeights output)
    : shape_(shape),
      live_(std::move(live)),
      columns_(live_.columns(), shape.head_size, output),
      keys_(0, shape.head_size) {}

std::span<const std::uint32_t> HeadCache::make_room(std::uint32_t now) {
  const std::vector<std::uint32_t> before(live_.positions().begin(), live_.positions().end());
  std::vector<std::uint32_t> victims;
  for (const std::uint32_t age : live_.make_room(now)) victims.push_back(before[age]);
  victims_ = std::move(victims);
  if (has_spare_rows()) compact();
  return victims_;
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
  seen_ = {};
  grow_to(from.size() + 1);
  std::vector<float> key(dim);
  for (std::size_t row = 0; row < from.size(); ++row) {
    keys.get_row(from[row], key.data());
    keys_.set_row(row, key.data());
    std::copy_n(&values[from[row] * dim], dim, &values_[row * dim]);
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
  if (shape_.positions != Positions::cache) return;
  plain_keys_.resize(rows * dim);
  rotated_to_.resize(rows);
}

void HeadCache::admit(const HeadAdmission& admission, const RopeTable& rope) {
  const KeyValueRows rows{admission.k, admission.v, admission.key_stride, admission.tokens};
  live_.admit(admission.first, admission.tokens, columns_.admit(rows, nullptr, 0));
  grow_to(live_.slot_count());
  store(admission, rope);
  if (shape_.positions == Positions::cache) squeeze(rope);
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

/// Products of the queries, rotated to their positions or to their numbers, with the keys of all
/// rows: [query, head, row].
void HeadCache::multiply_at(const HeadAdmission& admission, std::uint32_t begin, std::uint32_t end,
                            bool by_number, std::size_t panels, const RopeTable& rope,
                            std::vector<float>& by_row) const {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> rotated(queries * dim);
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    rope.rotate(admission.q + token * admission.query_stride + i % group * dim, dim,
                by_number ? visible(admission, token) - 1 : admission.first + token,
                &rotated[i * dim]);
  }
  by_row.resize(queries * stride);
  multiply_fused(rotated.data(), queries, dim, keys_, 0, panels, by_row.data(), stride);
}

void HeadCache::attend(const HeadAdmission& admission, std::uint32_t begin, std::uint32_t end,
                       const RopeTable& rope) {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  const std::span rows = live_.slots().first(visible(admission, end - 1));
  const std::size_t panels = *std::max_element(rows.begin(), rows.end()) / 16 + 1;
  const std::size_t queries = (end - begin) * group, stride = panels * 16;
  std::vector<float> by_row, by_row_of_old, by_age(rows.size());
  multiply_at(admission, begin, end, false, panels, rope, by_row);
  if (old_ > 0) multiply_at(admission, begin, end, true, panels, rope, by_row_of_old);

  Tally received(live_, shape_.threshold16, static_cast<std::uint32_t>(rows.size()));
  for (std::size_t i = 0; i < queries; ++i) {
    const std::uint32_t token = begin + static_cast<std::uint32_t>(i / group);
    const std::size_t head = i % group, count = visible(admission, token);
    float* p = by_age.data();
    for (std::size_t age = 0; age < count; ++age)
      p[age] = (age < old_ ? by_row_of_old : by_row)[i * stride + rows[age]];
    scale(p, count, shape_.softmax_scale);
    const std::int32_t shift = shared_exponentials(p, count, p);
    const float sum = lane_sum(p, count);
    divide(p, count, sum, p);
    admission.lse[token * admission.lse_stride + head] =
        static_cast<float>(log_sum_exp(shift, static_cast<double>(sum)));
    float* out = admission.out + token * admission.query_stride + head * dim;
    std::fill_n(out, dim, 0.0f);
    accumulate_rows({p, count}, rows.first(count), values_.data(), dim, dim, out);
    received.add_row({p, count}, admission.tokens - 1 - token);
    if (head + 1 == group) received.end_query(admission.first + token);
  }
  const std::lock_guard lock(seen_mutex_);
  seen_.merge(received);
}

std::span<const Observation> HeadCache::observe() {
  live_.observe(seen_.seen());
  return seen_.seen();
}

}  // namespace kvlab
