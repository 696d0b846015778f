#include "sim/cache/host_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "traces/base/numeric/quantize.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kFewRows =
    64;  // caches with at most this many rows are not compacted before the end of a prompt

/// Whether elements are rounded in RowState::rotated.
bool is_rotated(const RowFormat& format) { return format.rotation == Rotation::blocks; }

/// Converts a row from one RowState to the other.
void switch_state(std::span<float> row, RowState& state) {
  hadamard_rotate(row);
  if (state == RowState::rotated)
    for (float& x : row) x /= kQuantBlock;
  state = state == RowState::plain ? RowState::rotated : RowState::plain;
}

/// The number of channels that llama.cpp rotates together.
std::size_t llama_block(std::size_t row_size, RowPart part) {
  if (row_size % kLlamaRotation != 0)
    throw std::invalid_argument(fmt::format(
        "llama.cpp rotates only heads of a multiple of {} channels, not {}; use a format "
        "without _rot",
        kLlamaRotation, row_size));
  return part == RowPart::value ? kLlamaRotation : row_size & (~row_size + 1);
}

void round_unrotated(std::span<float> row, const RowFormat& format) {
  switch (format.encoding) {
    case Encoding::none:
      return;
    case Encoding::integer:
      return quantize_row(row, format.bits, false);
    case Encoding::e4m3_block:
      return quantize_row(row, format.bits, true);
    case Encoding::e4m3:
      return quantize_e4m3(row);
    case Encoding::ggml:
      return quantize_ggml(row, format.bits);
    case Encoding::ggml_min:
      return quantize_ggml_min(row, format.bits);
    case Encoding::nvfp4:
      return quantize_nvfp4(row);
    case Encoding::quanto:
      return quantize_quanto(row, format.bits);
  }
}

/// Rounds the elements of a row. If the format has Rotation::blocks, the row must already be
/// rotated.
void round_elements(std::span<float> row, const RowFormat& format, RowPart part) {
  if (format.rotation != Rotation::llama) return round_unrotated(row, format);
  const std::size_t block = llama_block(row.size(), part);
  hadamard_rotate_orthonormal(row, block);
  round_unrotated(row, format);
  hadamard_rotate_orthonormal(row, block);
}

/// Quantizes a row to the formats of `path`, one after another. `state` is the state of the row
/// before the call. After the call, the row is rotated.
void quantize_part(std::span<const KvFormat> path, RowPart part, std::span<float> row,
                   RowState state) {
  for (const KvFormat& format : path) {
    const RowFormat& own = part == RowPart::key ? *format.key : *format.value;
    if (own.exact()) continue;
    if (is_rotated(own) != (state == RowState::rotated)) switch_state(row, state);
    round_elements(row, own, part);
  }
  if (state == RowState::plain) switch_state(row, state);
}

/// Returns the products of queries with the keys in the first `panels` panels: [query, row].
std::vector<float> products_with(std::span<const float> queries, const Panels& keys,
                                 std::size_t panels) {
  const std::size_t dim = keys.depth(), count = queries.size() / dim, stride = panels * 16;
  std::vector<float> by_row(count * stride);
  multiply_fused(queries.data(), count, dim, keys, 0, panels, by_row.data(), stride);
  return by_row;
}

}  // namespace

void rotate_rounded(const RopeTable& rope, const float* x, std::size_t size, std::uint32_t position,
                    std::optional<Dtype> rounding, float* y) {
  rope.rotate(x, size, position, y);
  for (std::size_t d = 0; rounding && d < size; ++d) y[d] = round_to(*rounding, y[d]);
}

void quantize_row(std::span<float> row, const RowFormat& format, RowPart part) {
  RowState state = RowState::plain;
  if (is_rotated(format)) switch_state(row, state);
  round_elements(row, format, part);
  if (is_rotated(format)) switch_state(row, state);
}

void quantize_token(std::span<const KvFormat> path, std::span<float> key, std::span<float> value,
                    RowState state) {
  quantize_part(path, RowPart::key, key, state);
  quantize_part(path, RowPart::value, value, state);
}

void quantize_by_channel(std::span<float> keys, std::size_t dim, int bits) {
  std::vector<float> by_channel(kQuantBlock * dim);
  for (std::size_t base = 0; base < keys.size(); base += by_channel.size()) {
    const auto swap = [&](auto each) {
      for (std::size_t i = 0; i < kQuantBlock; ++i)
        for (std::size_t d = 0; d < dim; ++d)
          each(keys[base + i * dim + d], by_channel[d * kQuantBlock + i]);
    };
    swap([](float key, float& quantized) { quantized = key; });
    quantize_row(by_channel, bits, false);
    swap([](float& key, float quantized) { key = quantized; });
  }
}

HostCache::HostCache(const HeadShape& shape, LiveSet live, OutputWeights output,
                     FeaturesByName feature_values)
    : shape_(shape),
      live_(std::move(live)),
      features_(live_.features(), shape.head_size, output),
      feature_values_(std::move(feature_values)),
      keys_(0, shape.head_size) {
  if (live_.centre() != KeyCentre::none) check_centre(shape.softcap != 0, !shape.sinks.empty());
  if (!live_.is_quantized()) return;
  check_quantized_heads(shape.head_size);
  rotates_ = !live_.tier_plan().front().format.kivi;
}

HostCache::HostCache(const HostCache& other)
    : shape_(other.shape_),
      live_(other.live_),
      rotates_(other.rotates_),
      features_(other.features_),
      feature_values_(other.feature_values_),
      keys_(other.keys_),
      values_(other.values_),
      plain_keys_(other.plain_keys_),
      rotated_to_(other.rotated_to_),
      tiers_(other.tiers_),
      kivi_keys_(other.kivi_keys_),
      kivi_values_(other.kivi_values_),
      centre_(other.centre_),
      centred_(other.centred_),
      old_(other.old_) {
  // values_ and plain_keys_ must have the same capacity as keys_, and a copied vector has no spare
  // capacity.
  values_.reserve(other.values_.capacity());
  plain_keys_.reserve(other.plain_keys_.capacity());
}

void HostCache::step(const HeadAppend& append, const RopeTable& rope) {
  begin_step(append, rope);
  const bool attends = append.out || live_.needs() != Needs::nothing;
  for (std::uint32_t begin = 0; attends && begin < append.tokens; begin += kQueryBlock)
    attend(append, begin, std::min(append.tokens, begin + kQueryBlock), rope);
  end_step();
}

void HostCache::begin_step(const HeadAppend& append, const RopeTable& rope) {
  drop_drafts();
  evict_to_budget(append.first);
  this->append(append, rope);
}

void HostCache::end_step() { live_.observe(seen_.observations(), seen_.heads()); }

void HostCache::evict_to_budget(std::uint32_t now) {
  if (evicted_for_ == now) return;
  evicted_for_ = now;
  drop_drafts();  // their rows are behind the live tokens' rows, which may now become fewer
  const std::vector<std::uint32_t> before(live_.positions().begin(), live_.positions().end());
  std::vector<std::uint32_t> victims;
  for (const std::uint32_t age : live_.evict_to_budget(now)) victims.push_back(before[age]);
  victims_ = std::move(victims);
  centre_live_keys();
  demote(0, live_.size());
  if (has_spare_rows()) compact();
}

std::uint32_t HostCache::first_visible(std::uint32_t position) const {
  const auto live = live_.positions();
  const std::uint32_t oldest = first_seen(shape_.window, position);
  return static_cast<std::uint32_t>(std::ranges::lower_bound(live, oldest) - live.begin());
}

/// Whether rows should be freed. After a prompt, all unused rows are freed, except one for the next
/// token. At other times, they are freed only if most rows are unused, because rows that were
/// needed once are likely to be needed again.
bool HostCache::has_spare_rows() const {
  const std::uint32_t rows = live_.slot_count(), live = live_.size();
  return live_.after_prompt() ? rows > live + 1 : rows > kFewRows && live < rows / 2;
}

/// Moves the live tokens to the first rows. After a long prompt only a few tokens are live,
/// scattered over all rows.
void HostCache::compact() {
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
    if (rotates_) tiers_[row] = tiers[from[row]];
    if (shape_.positions != Positions::cache) continue;
    std::copy_n(&plain_keys[from[row] * dim], dim, &plain_keys_[row * dim]);
    rotated_to_[row] = rotated_to[from[row]];
  }
}

/// Sets the number of rows. If the capacity is too small, it grows by half, but to no more rows
/// than the budget needs.
void HostCache::grow_to(std::size_t rows) {
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
  if (rotates_) tiers_.resize(rows);
  if (shape_.positions != Positions::cache) return;
  plain_keys_.resize(rows * dim);
  rotated_to_.resize(rows);
}

void HostCache::append(const HeadAppend& append, const RopeTable& rope) {
  KeyValueRows rows{append.k, append.v, append.key_stride, append.tokens};
  rows.q = append.q, rows.group = shape_.group;
  rows.q_head_stride = append.query_head_stride, rows.q_stride = append.query_stride;
  rows.inv_freq = rope.rope().inv_freq, rows.rope_factor = rope.rope().factor;
  rows.softmax_scale = shape_.softmax_scale;
  const std::size_t end = std::size_t{append.first} + append.tokens;
  for (auto& [name, feature] : feature_values_) feature.resize(std::max(feature.size(), end));
  live_.append(append.first, append.tokens, features_.append(rows, &feature_values_, append.first));
  grow_to(live_.slot_count());
  if (append.first == 0) find_centre(append, rope);
  store(append, live_.slots().last(append.tokens), live_.positions().last(append.tokens), rope);
  if (shape_.positions == Positions::cache)
    rotate_to_cache_positions(rope, append.first + append.tokens);
  if (append.tokens == 1) demote(live_.size() - 1, live_.size());
  if (live_.is_quantized() && !rotates_) quantize_as_kivi(append.first);
  seen_ = Tally(live_, shape_.threshold16, live_.size());
  seen_.set_queries(append.tokens);
}

/// Writes the append's keys, rotated to `positions`, and its values to `rows`, in 16 bit.
void HostCache::store(const HeadAppend& append, std::span<const std::uint32_t> rows,
                      std::span<const std::uint32_t> positions, const RopeTable& rope) {
  const std::size_t dim = shape_.head_size;
  std::vector<float> rotated(dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float* key = append.k + i * append.key_stride;
    const float* value = append.v + i * append.key_stride;
    rotate_rounded(rope, key, dim, positions[i], shape_.rounding, rotated.data());
    if (centred_) subtract_centre(rotated);
    keys_.set_row(rows[i], rotated.data());
    std::copy_n(value, dim, &values_[rows[i] * dim]);
    if (rotates_) tiers_[rows[i]] = -1;
    if (shape_.positions == Positions::cache) {
      std::copy_n(key, dim, &plain_keys_[rows[i] * dim]);
      rotated_to_[rows[i]] = positions[i];
    }
  }
}

/// Computes the centre from the first keys of the append at position 0, or copies it from the
/// constants of a centre file.
void HostCache::find_centre(const HeadAppend& append, const RopeTable& rope) {
  centre_.clear();
  centred_ = live_.centre() == KeyCentre::constants;
  if (centred_) {
    const std::span<const float> constants = live_.centre_constants();
    centre_.assign(constants.begin(), constants.end());
    return;
  }
  const std::uint32_t count = centre_keys(append.tokens);
  if (live_.centre() == KeyCentre::none || count == 0) return;
  const std::size_t dim = shape_.head_size;
  std::vector<float> keys(count * dim);
  for (std::uint32_t i = 0; i < count; ++i)
    rotate_rounded(rope, append.k + i * append.key_stride, dim, append.first + i, shape_.rounding,
                   &keys[i * dim]);
  for (std::size_t d = 0; d < dim; ++d) {
    CentreChannel channel;
    for (std::uint32_t i = 0; i < count; ++i) channel.add(keys[i * dim + d]);
    centre_.push_back(channel.mean());
  }
}

/// Subtracts the centre from the stored keys. It is called when the append at position 0 has ended.
/// Later keys are centred when they are stored.
void HostCache::centre_live_keys() {
  if (centre_.empty() || centred_) return;
  centred_ = true;
  std::vector<float> key(shape_.head_size);
  for (const std::uint32_t row : live_.slots()) {
    keys_.get_row(row, key.data());
    subtract_centre(key);
    keys_.set_row(row, key.data());
  }
}

/// Subtracts the centre from a key, and rounds the result to the type of the stored keys.
void HostCache::subtract_centre(std::span<float> key) const {
  for (std::size_t d = 0; d < key.size(); ++d) {
    key[d] -= centre_[d];
    if (shape_.rounding) key[d] = round_to(*shape_.rounding, key[d]);
  }
}

/// Scores depend only on differences of positions. So tokens that are younger than every evicted
/// token can keep their original positions, and only the keys of the other tokens are rotated to
/// cache positions. When a token is evicted, the cache positions of all younger tokens change.
/// Their keys are then rotated again, from the unrotated keys. `next`: the position that follows
/// the live tokens.
void HostCache::rotate_to_cache_positions(const RopeTable& rope, std::uint32_t next) {
  const std::size_t dim = shape_.head_size;
  const auto live = live_.positions();
  const bool gap_at_end = !live.empty() && live.back() + 1 != next;
  old_ = gap_at_end ? live_.size() : tokens_before_gaps(live);
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

void HostCache::demote(std::uint32_t first, std::uint32_t last) {
  if (!rotates_) return;
  const std::size_t dim = shape_.head_size;
  std::vector<float> key(dim);
  for (std::uint32_t age = first; age < last; ++age) {
    const std::uint32_t row = live_.slots()[age];
    const int from = tiers_[row], to = static_cast<int>(live_.tier(age));
    if (from == to) continue;
    const auto formats = demotion_path(live_.tier_plan(), from, to);
    const RowState state = is_quantized(row) ? RowState::rotated : RowState::plain;
    tiers_[row] = to;
    if (formats.empty()) continue;
    const std::span<float> value = std::span(values_).subspan(row * dim, dim);
    keys_.get_row(row, key.data());
    quantize_token(formats, key, value, state);
    keys_.set_row(row, key.data());
  }
}

/// Quantizes the keys and values that KIVI quantizes at the moment when new tokens are appended
/// after `before` older ones. With KIVI nothing is evicted, so a token's row is its position.
void HostCache::quantize_as_kivi(std::uint32_t before) {
  const KvFormat& format = live_.tier_plan().front().format;
  const std::size_t dim = shape_.head_size;
  const std::uint32_t count = kivi_keys(before) - kivi_keys_;
  std::vector<float> keys(count * dim);
  for (std::uint32_t i = 0; i < count; ++i) keys_.get_row(kivi_keys_ + i, &keys[i * dim]);
  quantize_by_channel(keys, dim, format.key->bits);
  for (std::uint32_t i = 0; i < count; ++i) keys_.set_row(kivi_keys_ + i, &keys[i * dim]);
  kivi_keys_ += count;
  for (; kivi_values_ < kivi_values(before); ++kivi_values_)
    quantize_row(std::span(values_).subspan(kivi_values_ * dim, dim), format.value->bits, false);
}

bool HostCache::all_exact(std::size_t count) const {
  if (!rotates_) return kivi_keys_ == 0 && kivi_values_ == 0;
  return std::ranges::none_of(live_.slots().first(count),
                              [&](std::uint32_t row) { return is_quantized(row); });
}

/// Rotates queries of an append by RoPE: those of to.size() tokens, from token `begin` on, to the
/// positions `to`. Returns [token, head, dim].
std::vector<float> HostCache::rotate_queries(const HeadAppend& append, std::uint32_t begin,
                                             std::span<const std::uint32_t> to,
                                             const RopeTable& rope) const {
  const std::size_t dim = shape_.head_size, group = shape_.group;
  std::vector<float> rotated(to.size() * group * dim);
  for (std::size_t i = 0; i < to.size() * group; ++i)
    rotate_rounded(
        rope,
        append.q + (begin + i / group) * append.query_stride + i % group * append.query_head_stride,
        dim, to[i / group], shape_.rounding, &rotated[i * dim]);
  return rotated;
}

/// Multiplies the queries of the tokens from `begin` on by the keys in the first `rows` rows. `at`:
/// the positions of these tokens.
HostCache::Products HostCache::multiply(const HeadAppend& append, std::uint32_t begin,
                                        const QueryPositions& at, std::size_t rows,
                                        const RopeTable& rope) const {
  const std::size_t panels = (rows + 15) / 16;
  Products products{.stride = panels * 16};
  std::vector<float> queries = rotate_queries(append, begin, at.positions, rope);
  products.at_position = products_with(queries, keys_, panels);
  if (old_ > 0)
    products.at_cache_position =
        products_with(rotate_queries(append, begin, at.cache_positions, rope), keys_, panels);
  if (rotates_) {
    hadamard_rotate(queries);
    products.hadamard_rotated = products_with(queries, keys_, panels);
  }
  return products;
}

/// Collects the scores of the tokens that a query sees. `query` is the index of the query in
/// `products`.
void HostCache::gather_scores(const Products& products, std::size_t query, const SeenRows& seen,
                              std::span<float> scores) const {
  const std::span rows = seen.rows;
  const std::size_t base = query * products.stride;
  for (std::size_t i = 0; i < scores.size(); ++i)
    scores[i] = (seen.first_age + i < old_ ? products.at_cache_position
                                           : products.at_position)[base + rows[i]];
  for (std::size_t i = 0; rotates_ && i < scores.size(); ++i)
    if (is_quantized(rows[i])) scores[i] = products.hadamard_rotated[base + rows[i]] / kQuantBlock;
  make_scores(scores.data(), scores.size(), shape_.softmax_scale, shape_.softcap);
}

/// Computes the probabilities that a query gives the tokens that it sees, and the log-sum-exp of
/// its scores unless `lse` is null.
void HostCache::find_probabilities(const Products& products, std::size_t query,
                                   const SeenRows& seen, std::span<float> p, float* lse) const {
  gather_scores(products, query, seen, p);
  const float* sink = shape_.sinks.empty() ? nullptr : &shape_.sinks[query % shape_.group];
  const RowSum all = row_exponentials(p.data(), p.size(), sink, p.data());
  divide(p.data(), p.size(), all.sum, p.data());
  if (lse) *lse = static_cast<float>(log_sum_exp(all.shift, static_cast<double>(all.sum)));
}

/// Collects the attention that the tokens of a cache, and those of its followers (see Attention),
/// receive from some queries of an append.
class HostCache::Received {
 public:
  /// `all`: whether these are all queries of the append. Then no other thread adds to the tallies
  /// of the caches, and no lock is needed. The queries see at most `max_visible` tokens.
  Received(HostCache& own, std::span<HostCache* const> followers, bool all,
           std::uint32_t max_visible) {
    add(own, all, max_visible);
    for (HostCache* const follower : followers) add(*follower, all, max_visible);
  }

  void add_row(std::span<const float> p, std::uint32_t age) {
    for (Part& part : parts_) part.tally().add_row(p, age);
  }
  void end_query(std::uint32_t position) {
    for (Part& part : parts_) part.tally().end_query(position);
  }
  void finish() {
    for (Part& part : parts_) {
      if (part.all) continue;
      const std::lock_guard lock(part.cache->seen_mutex_);
      part.cache->seen_.merge(part.own);
    }
  }

 private:
  struct Part {
    HostCache* cache;
    bool all;
    Tally own;
    Tally& tally() { return all ? cache->seen_ : own; }
  };
  void add(HostCache& cache, bool all, std::uint32_t max_visible) {
    if (cache.live_.needs() == Needs::nothing) return;
    parts_.push_back({&cache, all, {}});
    if (!all) parts_.back().own = Tally(cache.live_, cache.shape_.threshold16, max_visible);
  }

  std::vector<Part> parts_;
};

void HostCache::attend(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
                       const RopeTable& rope, const Attention& how) {
  const std::size_t group = shape_.group;
  const std::uint32_t max_visible = visible(append, end - 1);
  const bool computes =
      !how.shared || shape_.positions == Positions::cache || !all_exact(max_visible);
  QueryPositions at;
  for (std::uint32_t token = begin; computes && token < end; ++token) {
    at.positions.push_back(append.first + token);
    at.cache_positions.push_back(visible(append, token) - 1);
  }
  Products products;
  if (computes)
    products =
        multiply(append, begin, at, std::ranges::max(live_.slots().first(max_visible)) + 1, rope);
  if (append.lse && centred_)
    throw std::invalid_argument(
        "centre: log-sum-exp of attention is not exported with centred keys; use centre=none");
  Received received(*this, how.followers, end - begin == append.tokens, max_visible);
  std::vector<float> by_age(max_visible);
  for (std::uint32_t token = begin; token < end; ++token) {
    // Shared probabilities are already 0 for tokens outside a window.
    const std::uint32_t first = computes ? first_visible(append.first + token) : 0;
    const std::span p = std::span(by_age).first(visible(append, token) - first);
    const SeenRows seen{live_.slots().subspan(first, p.size()), first};
    for (std::uint32_t head = 0; head < group; ++head) {
      if (computes)
        find_probabilities(products, (token - begin) * group + head, seen, p,
                           append.lse ? append.lse + token * append.lse_stride + head : nullptr);
      else
        how.shared->probabilities(append.first + token, head, live_.positions().first(p.size()),
                                  p.data());
      write_output(append, token, head, p, seen.rows);
      received.add_row(p, append.tokens - 1 - token);
      if (how.visit) how.visit(append.first + token, head, p);
    }
    received.end_query(append.first + token);
  }
  received.finish();
}

void HostCache::attend_draft(const HeadAppend& tokens, std::span<const DraftPath> paths,
                             const RopeTable& rope) {
  evict_to_budget(tokens.first);
  if (shape_.positions == Positions::cache) rotate_to_cache_positions(rope, tokens.first);
  const std::uint32_t spare = live_.slot_count();  // the first spare row
  QueryPositions at;
  std::vector<std::uint32_t> rows;
  for (const DraftPath& path : paths) {
    const auto depth = static_cast<std::uint32_t>(path.size()) - 1;
    // Draft tokens are younger than every evicted token, so they keep their original positions.
    at.positions.push_back(tokens.first + depth);
    at.cache_positions.push_back(live_.size() + depth);
    if (path.back() != drafts_)
      throw std::logic_error("a cache: draft tokens attend in another order than their numbers");
    rows.push_back(spare + drafts_++);
  }
  grow_to(spare + drafts_);
  store(tokens, rows, at.positions, rope);
  const Products products = multiply(tokens, 0, at, spare + drafts_, rope);
  for (std::uint32_t token = 0; token < paths.size(); ++token) {
    const std::uint32_t first = first_visible(at.positions[token]),
                        oldest = first_seen(shape_.window, at.positions[token]);
    const auto live = live_.slots().subspan(first);
    std::vector<std::uint32_t> seen(live.begin(), live.end());
    for (const std::uint32_t node :
         std::span(paths[token]).subspan(oldest > tokens.first ? oldest - tokens.first : 0))
      seen.push_back(spare + node);
    std::vector<float> p(seen.size());
    for (std::uint32_t head = 0; head < shape_.group; ++head) {
      find_probabilities(products, std::size_t{token} * shape_.group + head, {seen, first}, p,
                         nullptr);
      write_output(tokens, token, head, p, seen);
    }
  }
}

/// Writes the output of a query head if outputs are computed.
void HostCache::write_output(const HeadAppend& append, std::uint32_t token, std::uint32_t head,
                             std::span<const float> p, std::span<const std::uint32_t> rows) const {
  if (!append.out) return;
  float* const out = append.out + token * append.query_stride + head * append.query_head_stride;
  std::fill_n(out, shape_.head_size, 0.0f);
  accumulate(p, rows, out);
}

void HostCache::accumulate(std::span<const float> p, std::span<const std::uint32_t> rows,
                           float* out) const {
  const std::size_t dim = shape_.head_size;
  const auto quantized = [&](std::uint32_t row) { return is_quantized(row); };
  if (!rotates_ || std::ranges::none_of(rows, quantized))
    return accumulate_rows(p, rows, values_.data(), dim, dim, out);
  std::vector<std::uint32_t> rows_of[2];  // [0: exact rows, 1: quantized rows]
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

}  // namespace kvlab
