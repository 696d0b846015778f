#include "sim/quantized_rows.hpp"

#include <algorithm>

#include "sim/tiers/kivi_rows.hpp"
#include "traces/base/numeric/quantize.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {

void take_token(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
                std::uint32_t position, std::span<float> key, std::span<float> value) {
  rotate_original(rope, arithmetic, view.key(position), view.head_size, position, key.data());
  std::copy_n(view.v + position * view.kv_token_stride, view.head_size, value.begin());
  hadamard_rotate(key);
  hadamard_rotate(value);
}

void quantize_token(std::span<const KvFormat* const> path, std::span<float> key,
                    std::span<float> value) {
  for (const KvFormat* format : path) {
    quantize_row(key, format->key_bits, format->floating);
    quantize_row(value, format->value_bits, format->floating);
  }
}

std::unique_ptr<KeptRows> kept_rows(const KvFormat& format, const HeadView& view,
                                    const RopeTable& rope, const HeadArithmetic& arithmetic) {
  check_quantized_heads(view.head_size);
  if (format.kivi) return std::make_unique<KiviRows>(format, view, rope, arithmetic);
  return std::make_unique<QuantizedRows>(view, rope, arithmetic);
}

QuantizedRows::QuantizedRows(const HeadView& view, const RopeTable& rope,
                             const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic), keys_(0, view.head_size) {}

void QuantizedRows::update(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) {
  tier_plan_ = live.tier_plan();
  keys_.grow(live.slot_count());
  values_.resize(std::size_t{live.slot_count()} * view_.head_size);
  held_.resize(live.slot_count());
  exact_.clear(), exact_ages_.clear(), quantized_.clear(), quantized_ages_.clear();
  for (std::uint32_t age = 0; age < visible; ++age) {
    const std::uint32_t position = live.positions()[age], slot = live.slots()[age];
    if (position >= exact_from || live.format(age).exact()) {
      exact_.push_back(position);
      exact_ages_.push_back(age);
      continue;
    }
    demote(slot, position, static_cast<int>(live.tier(age)));
    quantized_.push_back(slot);
    quantized_ages_.push_back(age);
  }
}

void QuantizedRows::demote(std::uint32_t slot, std::uint32_t position, int tier) {
  Held& held = held_[slot];
  if (held.position == position && held.tier == tier) return;
  const std::size_t dim = view_.head_size;
  std::vector<float> key(dim);
  const std::span<float> value = std::span(values_).subspan(slot * dim, dim);
  if (held.position != position) {
    held = {position, -1};
    take_token(view_, rope_, arithmetic_, position, key, value);
  } else {
    keys_.get_row(slot, key.data());
  }
  quantize_token(demotion_path(tier_plan_, held.tier, tier), key, value);
  keys_.set_row(slot, key.data());
  held.tier = tier;
}

void QuantizedRows::logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) {
  some_.resize(exact_.size());
  rows.logits(query, head, exact_, some_.data());
  for (std::size_t i = 0; i < exact_.size(); ++i) to[exact_ages_[i]] = some_[i];
  std::vector<float> q(view_.head_size);
  rotate_original(rope_, arithmetic_, view_.query(head, query), view_.head_size, query, q.data());
  hadamard_rotate(q);
  by_slot_.resize(keys_.panel_count() * 16);
  multiply_fused(q.data(), 1, view_.head_size, keys_, 0, keys_.panel_count(), by_slot_.data(),
                 by_slot_.size());
  some_.resize(quantized_.size());
  for (std::size_t i = 0; i < quantized_.size(); ++i)
    some_[i] = by_slot_[quantized_[i]] / kQuantBlock;
  make_scores(some_.data(), some_.size(), arithmetic_.softmax_scale, arithmetic_.softcap);
  for (std::size_t i = 0; i < quantized_.size(); ++i) to[quantized_ages_[i]] = some_[i];
}

std::span<const float> QuantizedRows::some_of(std::span<const float> p,
                                              std::span<const std::uint32_t> ages) {
  some_.clear();
  for (const std::uint32_t age : ages) some_.push_back(p[age]);
  return some_;
}

void QuantizedRows::accumulate(std::span<const float> p, std::span<float> out) {
  const std::uint32_t dim = view_.head_size;
  if (!exact_.empty())
    accumulate_rows(some_of(p, exact_ages_), exact_, view_.v, view_.kv_token_stride, dim,
                    out.data());
  std::vector<float> sum(dim);
  accumulate_rows(some_of(p, quantized_ages_), quantized_, values_.data(), dim, dim, sum.data());
  hadamard_rotate(sum);
  for (std::size_t d = 0; d < dim; ++d) out[d] += sum[d] / kQuantBlock;
}

}  // namespace kvlab
