#include "sim/lanes/group_rows.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "policies/observation.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kRowBytes = std::size_t{1} << 19;  // exponentials in flight, of 1 MB of cache
constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr float kNevers[kQuad] = {kNever, kNever, kNever, kNever};
constexpr std::size_t kTilePanels = 6;  // of keys: a tile of logits stays in a near cache
constexpr std::size_t kTileTokens = kTilePanels * 16;
constexpr std::size_t kTailTokens = 64;  // of a range whose sum is kept

std::uint32_t block_for(std::size_t row_floats) {
  return static_cast<std::uint32_t>(
      std::clamp<std::size_t>(kRowBytes / (row_floats * sizeof(float)), 8, 32));
}

}  // namespace

float least_requested(float sum, float most, std::uint32_t threshold16) {
  const std::uint64_t row_max = fixed_mass(1.0f, most / sum);
  const auto asks = [&](float e) {
    return requested(fixed_mass(1.0f, e / sum), row_max, threshold16);
  };
  if (asks(0.0f)) return 0.0f;
  // The least mass that asks, then the exponential where rounding reaches it: nearly exact, so that
  // a step or two of one unit in the last place is left.
  const double mass =
      std::ceil(static_cast<double>(threshold16) * static_cast<double>(row_max) / 65536.0);
  auto e = static_cast<float>((mass - 0.5) * 0x1p-32 * static_cast<double>(sum));
  // The bits of floats that are not negative are in their order.
  const auto next_to = [](float x, int steps) {
    return std::bit_cast<float>(std::bit_cast<std::int32_t>(x) + steps);
  };
  while (!asks(e)) e = next_to(e, 1);
  while (asks(next_to(e, -1))) e = next_to(e, -1);
  return e;
}

RequestBand request_band(float sum, float most, std::uint32_t threshold16) {
  // With u = 2^-24, p is off by a factor of 1 +- u and its mass by another half: a token is surely
  // requested where e X (1 - u) - 0.5 >= t (most X (1 + u) + 0.5), X = 2^32 / sum, and surely not
  // where the opposite holds. Both bounds move outward by more than they are rounded.
  const double t = static_cast<double>(threshold16) / 65536.0;
  const double middle = t * static_cast<double>(most),
               halves = (1 + t) * 0.500001 * static_cast<double>(sum) * 1.001 * 0x1p-32;
  return {std::max(0.0f, static_cast<float>(middle * (1 - 0x1p-22) - halves)),
          static_cast<float>(middle * (1 + 0x1p-22) + halves)};
}

GroupRows::GroupRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view),
      rope_(rope),
      arithmetic_(arithmetic),
      keys_(view.tokens, view.head_size),
      quads_((view.group + kQuad - 1) / kQuad),
      stride_(keys_.panel_count() * kBlockTokens),
      words_((view.tokens + 63) / 64) {
  block_ = block_for(stride_ * heads());
  queries_.resize(std::size_t{block_} * view.group * view.head_size);
  tile_.resize(std::size_t{block_} * view.group * kTileTokens);
  e_.resize(std::size_t{block_} * heads() * stride_);
  sums_.resize(std::size_t{block_} * heads());
  most_.resize(sums_.size());
  shifts_.resize(sums_.size());
  lazy_.resize(block_);
  std::vector<float> key(view.head_size);
  for (std::uint32_t token = 0; token < view.tokens; ++token) {
    rotate(view.key(token), token, key.data());
    keys_.set_row(token, key.data());
  }
}

void GroupRows::compute(std::uint32_t first, std::uint32_t count, std::uint32_t from) {
  first_ = first;
  const std::size_t group = view_.group;
  for (std::uint32_t i = 0; i < count; ++i)
    for (std::uint32_t head = 0; head < group; ++head)
      rotate(view_.query(head, first + i), first + i,
             queries_.data() + (i * group + head) * view_.head_size);
  quad_rows_.clear();
  const std::size_t panels = (first + count + 15) / 16, begin = from / 16;
  for (std::size_t row = 0; row < std::size_t{count} * quads_; ++row)
    quad_rows_.push_back({.e = e_.data() + (row * stride_ + begin * 16) * kQuad});
  for (std::size_t panel = begin; panel < panels; panel += kTilePanels) {
    const std::size_t end = std::min(panel + kTilePanels, panels);
    multiply_fused_tile(queries_.data(), count * group, view_.head_size, keys_, panel, end,
                        tile_.data(), kTileTokens);
    extend(count, static_cast<std::uint32_t>(panel * 16), static_cast<std::uint32_t>(end * 16));
  }
  for (std::size_t row = 0; row < quad_rows_.size(); ++row) {
    row_loops().finish(quad_rows_[row], sums_.data() + row * kQuad, most_.data() + row * kQuad);
    std::copy_n(quad_rows_[row].shift, kQuad, shifts_.data() + row * kQuad);
  }
  for (Lazy& parts : lazy_)
    parts.requests = parts.flags = parts.masses = parts.asked = parts.tails = false;
}

/// From a tile's logits, of tokens [begin, end), to exponentials of those that a query sees.
void GroupRows::extend(std::uint32_t count, std::uint32_t begin, std::uint32_t end) {
  const std::size_t group = view_.group;
  for (std::uint32_t i = begin > first_ ? begin - first_ : 0; i < count; ++i)
    for (std::uint32_t quad = 0; quad < quads_; ++quad) {
      const float* rows[kQuad] = {};
      for (std::size_t h = 0; h < kQuad && quad * kQuad + h < group; ++h)
        rows[h] = tile_.data() + (i * group + quad * kQuad + h) * kTileTokens;
      row_loops().extend(quad_rows_[i * quads_ + quad], rows, std::min(end, first_ + i + 1) - begin,
                         arithmetic_.softmax_scale);
    }
}

GroupRows::Requests GroupRows::requests(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.requests) {
    parts.requests = true;
    parts.least.assign(heads(), kNever);
    parts.count.assign(heads(), 0);
    for (std::uint32_t h = 0; h < view_.group; ++h)
      parts.least[h] =
          least_requested(sums_[row(query) + h], most_[row(query) + h], arithmetic_.threshold16);
    float unused[kQuad];
    for (std::uint32_t quad = 0; quad < quads_; ++quad)
      row_loops().total(e(query, quad), nullptr, query, parts.least.data() + quad * kQuad, unused,
                        parts.count.data() + quad * kQuad);
  }
  return {parts.least.data(), parts.count.data()};
}

const std::uint64_t* GroupRows::request_bits(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.flags) {
    parts.flags = true;
    const Requests wanted = requests(query);
    parts.bits.resize(heads() * words_);
    parts.sure.resize(heads());
    for (std::uint32_t quad = 0; quad < quads_; ++quad) {
      float low[kQuad] = {}, high[kQuad] = {};
      for (std::size_t h = 0; h < kQuad; ++h) {
        const std::size_t at = row(query) + quad * kQuad + h;
        const RequestBand band = request_band(sums_[at], most_[at], arithmetic_.threshold16);
        low[h] = band.low;
        high[h] = band.high;
      }
      const std::uint32_t unsure =
          row_loops().flag(e(query, quad), query + std::size_t{1}, wanted.least + quad * kQuad, low,
                           high, parts.bits.data() + quad * kQuad * words_, words_);
      for (std::size_t h = 0; h < kQuad; ++h) parts.sure[quad * kQuad + h] = !(unsure >> h & 1);
    }
    for (std::uint32_t h = 0; h < heads(); ++h)
      parts.bits[h * words_ + query / 64] &= ~(std::uint64_t{1} << query % 64);
  }
  return parts.bits.data();
}

bool GroupRows::flag_level(std::uint32_t query, std::uint32_t head, float most,
                           std::uint64_t* bits) const {
  const RequestBand band = request_band(sums_[row(query) + head], most, arithmetic_.threshold16);
  return !row_loops().flag_head(e(query, head / kQuad), query + std::size_t{1}, head % kQuad,
                                band.low, band.high, bits);
}

const std::uint64_t* GroupRows::masses(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.masses) {
    parts.masses = true;
    parts.mass.resize(stride_);
    for (std::uint32_t quad = 0; quad < quads_; ++quad) {
      row_loops().masses(e(query, quad), query + 1, sums(query) + quad * kQuad, quad == 0,
                         parts.mass.data());
    }
  }
  return parts.mass.data();
}

void GroupRows::add_masses(std::uint32_t query, std::uint64_t* mass) const {
  for (std::uint32_t quad = 0; quad < quads_; ++quad)
    row_loops().masses(e(query, quad), query + std::size_t{1}, sums(query) + quad * kQuad, false,
                       mass);
}

const std::uint32_t* GroupRows::asked(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.asked) {
    parts.asked = true;
    const Requests wanted = requests(query);
    parts.any.resize(stride_);
    for (std::uint32_t quad = 0; quad < quads_; ++quad) {
      row_loops().mark(e(query, quad), query + 1, wanted.least + quad * kQuad, quad == 0,
                       parts.any.data());
    }
  }
  return parts.any.data();
}

/// Sums of whole ranges of tokens, from the last one on.
void GroupRows::sum_tails(std::uint32_t query, Lazy& parts) {
  const std::size_t ranges = query / kTailTokens + 1;
  parts.tail.assign(quads_ * (ranges + 1), {});
  for (std::uint32_t quad = 0; quad < quads_; ++quad)
    for (std::size_t r = ranges; r-- > 0;) {
      const std::size_t begin = r * kTailTokens,
                        end = std::min<std::size_t>(begin + kTailTokens, query + std::size_t{1});
      float sum[kQuad];
      std::uint32_t hits[kQuad] = {};
      row_loops().total(e(query, quad) + begin * kQuad, nullptr, end - begin, kNevers, sum, hits);
      auto& tail = parts.tail[quad * (ranges + 1) + r];
      tail = parts.tail[quad * (ranges + 1) + r + 1];
      for (std::size_t h = 0; h < kQuad; ++h) tail[h] += static_cast<double>(sum[h]);
    }
}

std::array<double, kQuad> GroupRows::sums_from(std::uint32_t query, std::uint32_t quad,
                                               std::uint32_t first) {
  Lazy& parts = lazy(query);
  if (!parts.tails) sum_tails(query, parts);
  parts.tails = true;
  const std::size_t ranges = query / kTailTokens + 1, next = first / kTailTokens + 1;
  const std::size_t end = std::min<std::size_t>(next * kTailTokens, query + std::size_t{1});
  float sum[kQuad];
  std::uint32_t hits[kQuad] = {};
  row_loops().total(e(query, quad) + first * kQuad, nullptr, end - first, kNevers, sum, hits);
  std::array<double, kQuad> sums = parts.tail[quad * (ranges + 1) + next];
  for (std::size_t h = 0; h < kQuad; ++h) sums[h] += static_cast<double>(sum[h]);
  return sums;
}

void GroupRows::logits(std::uint32_t query, std::uint32_t head,
                       std::span<const std::uint32_t> tokens, float* out) const {
  const float* q =
      queries_.data() + (std::size_t{query - first_} * view_.group + head) * view_.head_size;
  std::vector<float> key(view_.head_size);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    keys_.get_row(tokens[i], key.data());
    out[i] = dot_fused(q, key.data(), view_.head_size);
  }
  scale(out, tokens.size(), arithmetic_.softmax_scale);
}

}  // namespace kvlab
