#include "sim/config_batches/group_rows.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "policies/observation.hpp"
#include "policies/tiers/format.hpp"
#include "traces/base/numeric/quantize.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

// Target size in bytes of the exponentials of a block. They fit into a CPU cache of 1 MB.
constexpr std::size_t kRowBytes = std::size_t{1} << 19;
constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr float kNevers[kHeadGroupSize] = {kNever, kNever, kNever, kNever};
// Panels of keys in a tile: few enough that the logits of a tile stay in the CPU cache.
constexpr std::size_t kTilePanels = 6;
constexpr std::size_t kTileTokens = kTilePanels * 16;
constexpr std::size_t kTailTokens =
    64;  // tokens per range; the sums from each range to the end are stored

std::uint32_t block_for(std::size_t row_floats) {
  return static_cast<std::uint32_t>(
      std::clamp<std::size_t>(kRowBytes / (row_floats * sizeof(float)), 8, 32));
}

}  // namespace

float min_requested(float sum, float max_exponential, std::uint32_t threshold16) {
  if (!(sum > 0 && std::isfinite(sum) && max_exponential >= 0 && max_exponential <= sum))
    throw std::runtime_error(
        "a row of attention has no finite probabilities, because its queries or keys are too large "
        "or damaged");
  const std::uint64_t row_max = fixed_mass(1.0f, max_exponential / sum);
  const auto asks = [&](float e) {
    return is_requested(fixed_mass(1.0f, e / sum), row_max, threshold16);
  };
  if (asks(0.0f)) return 0.0f;
  // Computes the smallest mass that counts as a request, and then an estimate of the smallest
  // exponential that rounds to this mass. The estimate is wrong by at most two units in the last
  // place. The loops below correct it.
  const double mass =
      std::ceil(static_cast<double>(threshold16) * static_cast<double>(row_max) / 65536.0);
  auto e = static_cast<float>((mass - 0.5) * 0x1p-32 * static_cast<double>(sum));
  // If floats are not negative, their bits, read as integers, have the same order as the floats.
  const auto next_to = [](float x, int steps) {
    return std::bit_cast<float>(std::bit_cast<std::int32_t>(x) + steps);
  };
  while (!asks(e)) e = next_to(e, 1);
  while (asks(next_to(e, -1))) e = next_to(e, -1);
  return e;
}

GroupRows::GroupRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
                     std::span<const float> quantized)
    : view_(view),
      rope_(rope),
      arithmetic_(arithmetic),
      quantized_(!quantized.empty()),
      keys_(view.tokens, view.head_size),
      head_groups_((view.group + kHeadGroupSize - 1) / kHeadGroupSize),
      stride_(keys_.panel_count() * kBlockTokens),
      words_((view.tokens + 63) / 64),
      gradients_(view.projection) {
  block_ = block_for(stride_ * heads());
  queries_.resize(std::size_t{block_} * view.group * view.head_size);
  tile_.resize(std::size_t{block_} * view.group * kTileTokens);
  e_.resize(std::size_t{block_} * heads() * stride_);
  sums_.resize(std::size_t{block_} * heads());
  largest_.resize(sums_.size());
  shifts_.resize(sums_.size());
  lazy_.resize(block_);
  std::vector<float> key(view.head_size);
  for (std::uint32_t token = 0; token < view.tokens; ++token) {
    if (quantized_)
      std::copy_n(quantized.data() + std::size_t{token} * key.size(), key.size(), key.data());
    else
      rotate_original(rope_, arithmetic_, view.key(token), view_.head_size, token, key.data());
    keys_.set_row(token, key.data());
  }
  if (quantized_)
    arithmetic_.softmax_scale /=
        kQuantBlock;  // because the Hadamard rotation H is not normalized: H H x = 32 x
}

void GroupRows::rotate_query(const float* x, std::uint32_t position, float* y) const {
  rotate_original(rope_, arithmetic_, x, view_.head_size, position, y);
  if (quantized_) hadamard_rotate({y, view_.head_size});
}

void GroupRows::compute(std::uint32_t first, std::uint32_t count, std::uint32_t from) {
  first_ = first;
  count_ = count;
  gradients_.move_to(first, count);
  const std::size_t group = view_.group;
  for (std::uint32_t i = 0; i < count; ++i)
    for (std::uint32_t head = 0; head < group; ++head)
      rotate_query(view_.query(head, first + i), first + i,
                   queries_.data() + (i * group + head) * view_.head_size);
  head_group_rows_.clear();
  const std::size_t panels = (first + count + 15) / 16, begin = from / 16;
  for (std::size_t row = 0; row < std::size_t{count} * head_groups_; ++row)
    head_group_rows_.push_back({.e = e_.data() + (row * stride_ + begin * 16) * kHeadGroupSize});
  for (std::size_t panel = begin; panel < panels; panel += kTilePanels) {
    const std::size_t end = std::min(panel + kTilePanels, panels);
    multiply_fused(queries_.data(), count * group, view_.head_size, keys_, panel, end, tile_.data(),
                   kTileTokens);
    extend(count, static_cast<std::uint32_t>(panel * 16), static_cast<std::uint32_t>(end * 16));
  }
  for (std::size_t row = 0; row < head_group_rows_.size(); ++row) {
    row_loops().finish(head_group_rows_[row], sums_.data() + row * kHeadGroupSize,
                       largest_.data() + row * kHeadGroupSize);
    std::copy_n(head_group_rows_[row].shift, kHeadGroupSize, shifts_.data() + row * kHeadGroupSize);
  }
  for (Lazy& parts : lazy_)
    parts.requests = parts.flags = parts.masses = parts.requested = parts.tails = parts.values =
        parts.outputs = parts.divided = false;
}

/// Converts the logits of a tile, which holds tokens [begin, end), to exponentials, and appends
/// them to the rows. The row of a query gets only the tokens that the query sees.
void GroupRows::extend(std::uint32_t count, std::uint32_t begin, std::uint32_t end) {
  const std::size_t group = view_.group;
  for (std::uint32_t i = begin > first_ ? begin - first_ : 0; i < count; ++i)
    for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group) {
      const float* rows[kHeadGroupSize] = {};
      for (std::size_t h = 0; h < kHeadGroupSize && head_group * kHeadGroupSize + h < group; ++h)
        rows[h] = tile_.data() + (i * group + head_group * kHeadGroupSize + h) * kTileTokens;
      row_loops().extend(head_group_rows_[i * head_groups_ + head_group], rows,
                         std::min(end, first_ + i + 1) - begin, arithmetic_.softmax_scale);
    }
}

GroupRows::Requests GroupRows::requests(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.requests) {
    parts.requests = true;
    parts.request_threshold.assign(heads(), kNever);
    parts.count.assign(heads(), 0);
    for (std::uint32_t h = 0; h < view_.group; ++h)
      parts.request_threshold[h] =
          min_requested(sums_[row(query) + h], largest_[row(query) + h], arithmetic_.threshold16);
    float unused[kHeadGroupSize];
    for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group)
      row_loops().total(e(query, head_group), nullptr, query,
                        parts.request_threshold.data() + head_group * kHeadGroupSize, unused,
                        parts.count.data() + head_group * kHeadGroupSize);
  }
  return {parts.request_threshold.data(), parts.count.data()};
}

const std::uint64_t* GroupRows::request_bits(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.flags) {
    parts.flags = true;
    const Requests wanted = requests(query);
    parts.bits.resize(heads() * words_);
    for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group)
      row_loops().flag(e(query, head_group), query + std::size_t{1},
                       wanted.request_threshold + head_group * kHeadGroupSize,
                       parts.bits.data() + head_group * kHeadGroupSize * words_, words_);
    for (std::uint32_t h = 0; h < heads(); ++h)
      parts.bits[h * words_ + query / 64] &= ~(std::uint64_t{1} << query % 64);
  }
  return parts.bits.data();
}

const std::uint64_t* GroupRows::masses(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.masses) {
    parts.masses = true;
    parts.mass.resize(stride_);
    for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group) {
      row_loops().masses(e(query, head_group), query + 1, sums(query) + head_group * kHeadGroupSize,
                         head_group == 0, parts.mass.data());
    }
  }
  return parts.mass.data();
}

void GroupRows::add_masses(std::uint32_t query, std::uint64_t* mass) const {
  for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group)
    row_loops().masses(e(query, head_group), query + std::size_t{1},
                       sums(query) + head_group * kHeadGroupSize, false, mass);
}

const std::uint32_t* GroupRows::request_flags(std::uint32_t query) {
  Lazy& parts = lazy(query);
  if (!parts.requested) {
    parts.requested = true;
    const Requests wanted = requests(query);
    parts.any.resize(stride_);
    for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group) {
      row_loops().mark(e(query, head_group), query + 1,
                       wanted.request_threshold + head_group * kHeadGroupSize, head_group == 0,
                       parts.any.data());
    }
  }
  return parts.any.data();
}

/// Computes, for each range of tokens, the sum of the exponentials from the beginning of the range
/// to the end of the row. Starts with the last range.
void GroupRows::sum_tails(std::uint32_t query, Lazy& parts) {
  const std::size_t ranges = query / kTailTokens + 1;
  parts.tail.assign(head_groups_ * (ranges + 1), {});
  for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group)
    for (std::size_t r = ranges; r-- > 0;) {
      const std::size_t begin = r * kTailTokens,
                        end = std::min<std::size_t>(begin + kTailTokens, query + std::size_t{1});
      float sum[kHeadGroupSize];
      std::uint32_t hits[kHeadGroupSize] = {};
      row_loops().total(e(query, head_group) + begin * kHeadGroupSize, nullptr, end - begin,
                        kNevers, sum, hits);
      auto& tail = parts.tail[head_group * (ranges + 1) + r];
      tail = parts.tail[head_group * (ranges + 1) + r + 1];
      for (std::size_t h = 0; h < kHeadGroupSize; ++h) tail[h] += static_cast<double>(sum[h]);
    }
}

std::array<double, kHeadGroupSize> GroupRows::sums_from(std::uint32_t query,
                                                        std::uint32_t head_group,
                                                        std::uint32_t first) {
  Lazy& parts = lazy(query);
  if (!parts.tails) sum_tails(query, parts);
  parts.tails = true;
  const std::size_t ranges = query / kTailTokens + 1, next = first / kTailTokens + 1;
  const std::size_t end = std::min<std::size_t>(next * kTailTokens, query + std::size_t{1});
  float sum[kHeadGroupSize];
  std::uint32_t hits[kHeadGroupSize] = {};
  row_loops().total(e(query, head_group) + first * kHeadGroupSize, nullptr, end - first, kNevers,
                    sum, hits);
  std::array<double, kHeadGroupSize> sums = parts.tail[head_group * (ranges + 1) + next];
  for (std::size_t h = 0; h < kHeadGroupSize; ++h) sums[h] += static_cast<double>(sum[h]);
  return sums;
}

/// Adds the values of tokens [begin, end), weighted by their exponentials.
void GroupRows::add_values(std::uint32_t query, std::size_t begin, std::size_t end,
                           float* sums) const {
  for (std::uint32_t head_group = 0; head_group < head_groups_; ++head_group)
    row_loops().accumulate(e(query, head_group) + begin * kHeadGroupSize, nullptr, end - begin,
                           view_.heads_in(head_group), view_.v + begin * view_.kv_token_stride,
                           view_.kv_token_stride, view_.head_size,
                           sums + head_group * kHeadGroupSize * view_.head_size);
}

const float* GroupRows::values_from(std::uint32_t query, std::uint32_t first) {
  Lazy& parts = lazy(query);
  const std::size_t size = std::size_t{heads()} * view_.head_size, ranges = query / kTailTokens + 1,
                    next = (first + kTailTokens - 1) / kTailTokens;
  const auto end_of = [&](std::size_t r) {
    return std::min<std::size_t>(r * kTailTokens, query + std::size_t{1});
  };
  if (!parts.values) {
    parts.values = true;
    parts.first_tail = ranges;
    parts.value_tail.resize((ranges + 1) * size);
    std::fill_n(parts.value_tail.begin() + static_cast<std::ptrdiff_t>(ranges * size), size, 0.0f);
  }
  while (parts.first_tail > next) {
    const std::size_t r = --parts.first_tail;
    float* const tail = parts.value_tail.data() + r * size;
    std::fill_n(tail, size, 0.0f);
    add_values(query, r * kTailTokens, end_of(r + 1), tail);
    for (std::size_t d = 0; d < size; ++d) tail[d] += tail[d + size];
  }
  values_.assign(size, 0.0f);
  add_values(query, first, end_of(next), values_.data());
  for (std::size_t d = 0; d < size; ++d) values_[d] += parts.value_tail[next * size + d];
  return values_.data();
}

/// Computes the outputs of a query. If all queries have gradients, the outputs of all queries are
/// needed. In this case, it also computes the outputs of the later queries of the block, so that
/// the values stay in the CPU cache for all rows.
void GroupRows::sum_outputs(std::uint32_t query) {
  constexpr std::size_t kNear = 128;  // tokens
  std::uint32_t end = query;
  do {
    lazy(end).outputs = true;
    lazy(end).output.assign(heads() * std::size_t{view_.head_size}, 0.0f);
    ++end;
  } while (gradient_samples() > 0 && end < first_ + count_ && !lazy(end).outputs);
  for (std::size_t begin = 0; begin < end; begin += kNear)
    for (std::uint32_t q = std::max(query, static_cast<std::uint32_t>(begin)); q < end; ++q)
      add_values(q, begin, std::min<std::size_t>(begin + kNear, q + std::size_t{1}),
                 lazy(q).output.data());
}

const float* GroupRows::outputs(std::uint32_t query) {
  Lazy& parts = lazy(query);
  const std::size_t dim = view_.head_size;
  if (!parts.outputs) sum_outputs(query);
  if (!parts.divided) {
    parts.divided = true;
    parts.norm2.assign(heads(), 0.0);
    const std::vector<float> nothing(dim);
    for (std::uint32_t head = 0; head < view_.group; ++head) {
      float* const out = parts.output.data() + head * dim;
      divide(out, dim, sums(query)[head], out);
      parts.norm2[head] = row_loops().distance2(out, nothing.data(), 1.0f, dim);
    }
  }
  return parts.output.data();
}

const double* GroupRows::norms2(std::uint32_t query) {
  outputs(query);
  return lazy(query).norm2.data();
}

void GroupRows::add_changes(std::uint32_t query, const float* kept, const float* factors,
                            float* changes) {
  row_loops().add_changes(outputs(query), kept, view_.group, factors, view_.head_size,
                          gradients_.row(query), gradients_.gradient_samples(), changes);
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
