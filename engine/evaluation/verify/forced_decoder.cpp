#include "engine/evaluation/verify/forced_decoder.hpp"

#include <algorithm>

#include "traces/base/parallel.hpp"

namespace kvlab {

ForcedDecoder::ForcedDecoder(const Model& model, const ResolvedConfig& cache,
                             std::optional<Dtype> rounding, unsigned threads)
    : model_(model),
      config_(model.config()),
      rounding_(rounding),
      quantizes_(cache.policy.tier_plan.is_quantized()),
      threads_(threads) {
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    const RowSpec& row = config_.rows[layer];
    attention_.emplace_back(row, config_.head_size, cache.positions_of(layer));
    ropes_.emplace_back(row.rope);
  }
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
      heads_.emplace_back(attention_[layer], ropes_[layer], config_.query_heads / config_.kv_heads);
}

std::vector<float> ForcedDecoder::round_values(std::vector<float> x) const {
  if (rounding_) round_all(*rounding_, std::span(x));
  return x;
}

void ForcedDecoder::begin(std::span<const std::int32_t> ids, std::uint32_t first) {
  append_ = {first, static_cast<std::uint32_t>(ids.size())};
  x_.resize(ids.size() * config_.hidden);
  q_.resize(ids.size() * config_.query_heads * config_.head_size);
  k_.resize(ids.size() * config_.kv_heads * config_.head_size);
  v_.resize(k_.size());
  out_.resize(q_.size());
  model_.embed(ids, x_.data());
}

void ForcedDecoder::layer(std::uint32_t layer, const LiveSets& live, std::span<const float> k,
                          std::span<const float> v) {
  const std::size_t tokens = append_.tokens;
  model_.attention_inputs(layer, round_values(x_).data(), tokens, q_.data(), k_.data(), v_.data(),
                          threads_);
  for (std::vector<float>* values : {&q_, &k_, &v_}) *values = round_values(std::move(*values));
  if (quantizes_) {
    own_kv_ = k_;
    own_kv_.insert(own_kv_.end(), v_.begin(), v_.end());
    k_.assign(k.begin(), k.end());
    v_.assign(v.begin(), v.end());
  }
  for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
    heads_[std::size_t{layer} * config_.kv_heads + head].append({q_, k_, v_, tokens}, head);
  parallel_for(config_.kv_heads, threads_, [&](std::size_t head) {
    const auto number = static_cast<std::uint32_t>(head);
    attend(layer, number, live(number));
  });
  model_.attention_output(layer, out_.data(), tokens, x_.data(), threads_);
  // The residual stream itself is not rounded.
  const std::vector<float> before = round_values(x_);
  std::vector<float> after = before;
  model_.mlp(layer, after.data(), tokens, threads_);
  for (std::size_t i = 0; i < x_.size(); ++i)
    x_[i] = rounding_ ? x_[i] + (after[i] - before[i]) : after[i];
}

void ForcedDecoder::attend(std::uint32_t layer, std::uint32_t kv_head, const LiveSet& live) {
  const Float64Attention& attention = attention_[layer];
  const HeadTokens& head = heads_[std::size_t{layer} * config_.kv_heads + kv_head];
  const std::uint32_t group = config_.query_heads / config_.kv_heads;
  const float* const sinks = config_.rows[layer].sinks_of(kv_head, group);
  AttendedRows rows = head.attend(live, append_, rounding_);
  if (rounding_) rows = rows.round_values(*rounding_);
  for (std::uint32_t n = 0; n < append_.tokens; ++n) {
    const std::uint32_t position = append_.first + n, end = live.size() - (append_.tokens - 1 - n);
    const std::size_t first = attention.first_visible(live, position);
    for (std::uint32_t g = 0; g < group; ++g) {
      std::vector<double> query = attention.query(head.query(position, g), position, end - 1);
      if (rounding_) round_all(*rounding_, std::span(query));
      const AttentionRow row =
          attention.row(query, rows, first, end, sinks ? sinks + g : nullptr, rounding_);
      float* const out =
          &out_[(std::size_t{n} * config_.query_heads + kv_head * group + g) * config_.head_size];
      std::ranges::transform(row.out, out, [](double x) { return static_cast<float>(x); });
    }
  }
}

std::vector<float> ForcedDecoder::logits() const {
  const std::vector<float> x = round_values(x_);
  std::vector<float> logits(config_.vocab);
  model_.logits(x.data() + x.size() - config_.hidden, 1, logits.data(), threads_);
  return logits;
}

}  // namespace kvlab
