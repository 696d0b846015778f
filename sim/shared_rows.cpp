#include "sim/shared_rows.hpp"

#include <algorithm>

#include "policies/observation.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {
namespace {

// Number of exponentials of a block: 2 MB of floats.
constexpr std::size_t kFloatsInFlight = std::size_t{1} << 19;

std::uint32_t block_for(const HeadView& view, std::size_t stride) {
  const std::size_t queries = kFloatsInFlight / (stride * view.group);
  return static_cast<std::uint32_t>(std::clamp<std::size_t>(queries, 6, 60));
}

}  // namespace

SharedRows::SharedRows(const HeadView& view, const RopeTable& rope,
                       const HeadArithmetic& arithmetic)
    : view_(view),
      rope_(rope),
      arithmetic_(arithmetic),
      keys_(view.tokens, view.head_size),
      stride_(keys_.panel_count() * 16),
      gradients_(view.projection) {
  block_ = block_for(view, stride_);
  const std::size_t rows = std::size_t{block_} * view.group;
  queries_.resize(rows * view.head_size);
  e_.resize(rows * stride_);
  sums_.resize(rows);
  sinks_.resize(rows);
  flags_.resize(rows * stride_);
  request_count_.resize(rows);
  outputs_.resize(rows * view.head_size);
  has_output_.resize(rows);
  std::vector<float> key(view_.head_size);
  for (std::uint32_t token = 0; token < view_.tokens; ++token) {
    rotate(view_.key(token), token, key.data());
    keys_.set_row(token, key.data());
  }
}

void SharedRows::compute(std::uint32_t first, std::uint32_t count) {
  first_ = first;
  gradients_.move_to(first, count);
  const std::size_t rows = std::size_t{count} * view_.group;
  for (std::uint32_t query = first; query < first + count; ++query)
    for (std::uint32_t head = 0; head < view_.group; ++head)
      rotate(view_.query(head, query), query,
             queries_.data() + index(query, head) * view_.head_size);
  multiply_fused(queries_.data(), rows, view_.head_size, keys_, 0, (first + count + 15) / 16,
                 e_.data(), stride_);
  for (std::uint32_t query = first; query < first + count; ++query)
    for (std::uint32_t head = 0; head < view_.group; ++head) {
      float* row = e_.data() + index(query, head) * stride_;
      const std::uint32_t unseen = first_seen(arithmetic_.window, query), seen = query + 1 - unseen;
      std::fill_n(row, unseen, 0.0f);
      make_scores(row + unseen, seen, arithmetic_.softmax_scale, arithmetic_.softcap);
      const RowSum sum = row_exponentials(row + unseen, seen, view_.sink(head), row + unseen);
      sums_[index(query, head)] = sum.sum;
      sinks_[index(query, head)] = sum.sink;
    }
  std::fill(request_count_.begin(), request_count_.end(), -1);
  std::fill(has_output_.begin(), has_output_.end(), false);
}

SharedRows::Row SharedRows::row(std::uint32_t query, std::uint32_t head) const {
  const std::size_t i = index(query, head);
  return {{e_.data() + i * stride_, query + std::size_t{1}}, sums_[i], sinks_[i]};
}

SharedRows::Requests SharedRows::requests(std::uint32_t query, std::uint32_t head) {
  const std::size_t i = index(query, head);
  std::uint8_t* flags = flags_.data() + i * stride_;
  if (request_count_[i] < 0) {
    const Row full = row(query, head);
    const float largest = *std::max_element(full.e.begin(), full.e.end());
    const std::uint64_t row_max = fixed_mass(1.0f, largest / full.sum);
    std::uint32_t count = 0;
    for (std::uint32_t j = 0; j < query; ++j) {
      flags[j] =
          is_requested(fixed_mass(1.0f, full.e[j] / full.sum), row_max, arithmetic_.threshold16);
      count += flags[j];
    }
    request_count_[i] = count;
  }
  return {{flags, query}, static_cast<std::uint32_t>(request_count_[i])};
}

std::span<const float> SharedRows::output(std::uint32_t query, std::uint32_t head) {
  const std::size_t i = index(query, head);
  float* out = outputs_.data() + i * view_.head_size;
  if (!has_output_[i]) {
    const Row full = row(query, head);
    p_.resize(full.e.size());
    divide(full.e.data(), full.e.size(), full.sum, p_.data());
    std::fill(out, out + view_.head_size, 0.0f);
    accumulate_rows(p_, {}, view_.v, view_.kv_token_stride, view_.head_size, out);
    has_output_[i] = true;
  }
  return {out, view_.head_size};
}

void SharedRows::probabilities(std::uint32_t query, std::uint32_t head,
                               std::span<const std::uint32_t> live, float* p) {
  const Row full = row(query, head);
  if (live.size() == full.e.size()) return divide(full.e.data(), live.size(), full.sum, p);
  for (std::size_t i = 0; i < live.size(); ++i) p[i] = full.e[live[i]];
  // In a layer with a window, all tokens that the query sees are live.
  if (arithmetic_.window > 0) return divide(p, live.size(), full.sum, p);
  const float sum = lane_sum(p, live.size());
  if (sum >= kSharedSumFloor) return divide(p, live.size(), sum + full.sink, p);
  logits(query, head, live, p);
  const RowSum all = row_exponentials(p, live.size(), view_.sink(head), p);
  divide(p, live.size(), all.sum, p);
}

void SharedRows::logits(std::uint32_t query, std::uint32_t head,
                        std::span<const std::uint32_t> tokens, float* out) const {
  const float* q = queries_.data() + index(query, head) * view_.head_size;
  std::vector<float> key(view_.head_size);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    keys_.get_row(tokens[i], key.data());
    out[i] = dot_fused(q, key.data(), view_.head_size);
  }
  make_scores(out, tokens.size(), arithmetic_.softmax_scale, arithmetic_.softcap);
}

}  // namespace kvlab
