#include "sim/tiers/kivi_rows.hpp"

#include <algorithm>
#include <numeric>

#include "traces/base/numeric/quantize.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {

void quantize_keys(std::span<float> keys, std::size_t dim, int bits) {
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

void KiviRows::update(const LiveSet&, std::uint32_t visible, std::uint32_t exact_from) {
  // Tokens of a query's append are exact until the query has attended.
  const std::uint32_t before = std::min(exact_from, visible - 1);
  visible_ = visible, quantized_keys_ = kivi_keys(before), quantized_values_ = kivi_values(before);
  const std::size_t dim = view_.head_size;
  while (tokens_.size() < visible) tokens_.push_back(static_cast<std::uint32_t>(tokens_.size()));
  if (const auto old = static_cast<std::uint32_t>(keys_.rows()); old < quantized_keys_) {
    std::vector<float> keys((quantized_keys_ - old) * dim);
    for (std::uint32_t i = old; i < quantized_keys_; ++i)
      rotate_original(rope_, arithmetic_, view_.key(i), view_.head_size, i, &keys[(i - old) * dim]);
    quantize_keys(keys, dim, format_.key_bits);
    keys_.grow(quantized_keys_);
    for (std::uint32_t i = old; i < quantized_keys_; ++i) keys_.set_row(i, &keys[(i - old) * dim]);
  }
  for (std::size_t i = values_.size() / dim; i < quantized_values_; ++i) {
    values_.insert(values_.end(), view_.v + i * view_.kv_token_stride,
                   view_.v + i * view_.kv_token_stride + dim);
    quantize_row(std::span(values_).last(dim), format_.value_bits, false);
  }
}

void KiviRows::logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) {
  const std::span<const std::uint32_t> exact(&tokens_[quantized_keys_], visible_ - quantized_keys_);
  rows.logits(query, head, exact, to + quantized_keys_);
  std::vector<float> q(view_.head_size);
  rotate_original(rope_, arithmetic_, view_.query(head, query), view_.head_size, query, q.data());
  products_.resize(keys_.panel_count() * 16);
  multiply_fused(q.data(), 1, view_.head_size, keys_, 0, keys_.panel_count(), products_.data(),
                 products_.size());
  std::copy_n(products_.data(), quantized_keys_, to);
  make_scores(to, quantized_keys_, arithmetic_.softmax_scale, arithmetic_.softcap);
}

void KiviRows::accumulate(std::span<const float> p, std::span<float> out) {
  const std::uint32_t dim = view_.head_size;
  const std::span<const std::uint32_t> tokens(tokens_.data(), visible_);
  accumulate_rows(p.first(quantized_values_), tokens.first(quantized_values_), values_.data(), dim,
                  dim, out.data());
  accumulate_rows(p.subspan(quantized_values_), tokens.subspan(quantized_values_), view_.v,
                  view_.kv_token_stride, dim, out.data());
}

}  // namespace kvlab
