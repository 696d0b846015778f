#include "sim/coded_rows.hpp"

#include <algorithm>

#include "sim/rungs/kivi_rows.hpp"
#include "traces/base/numeric/code.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {

void take_token(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
                std::uint32_t position, std::span<float> key, std::span<float> value) {
  rotate_original(rope, arithmetic, view.key(position), view.head_size, position, key.data());
  std::copy_n(view.v + position * view.kv_token_stride, view.head_size, value.begin());
  butterflies(key);
  butterflies(value);
}

void code_token(std::span<const KvForm* const> way, std::span<float> key, std::span<float> value) {
  for (const KvForm* form : way) {
    code_row(key, form->key_bits, form->floating);
    code_row(value, form->value_bits, form->floating);
  }
}

std::unique_ptr<KeptRows> kept_rows(const KvForm& form, const HeadView& view, const RopeTable& rope,
                                    const HeadArithmetic& arithmetic) {
  check_coded_heads(view.head_size);
  if (form.kivi) return std::make_unique<KiviRows>(form, view, rope, arithmetic);
  return std::make_unique<CodedRows>(view, rope, arithmetic);
}

CodedRows::CodedRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic), keys_(0, view.head_size) {}

void CodedRows::place(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) {
  ladder_ = live.ladder();
  keys_.grow(live.slot_count());
  values_.resize(std::size_t{live.slot_count()} * view_.head_size);
  held_.resize(live.slot_count());
  exact_.clear(), exact_ages_.clear(), coded_.clear(), coded_ages_.clear();
  for (std::uint32_t age = 0; age < visible; ++age) {
    const std::uint32_t position = live.positions()[age], slot = live.slots()[age];
    if (position >= exact_from || live.form(age).exact()) {
      exact_.push_back(position);
      exact_ages_.push_back(age);
      continue;
    }
    step_down(slot, position, static_cast<int>(live.rung(age)));
    coded_.push_back(slot);
    coded_ages_.push_back(age);
  }
}

void CodedRows::step_down(std::uint32_t slot, std::uint32_t position, int rung) {
  Held& held = held_[slot];
  if (held.position == position && held.rung == rung) return;
  const std::size_t dim = view_.head_size;
  std::vector<float> key(dim);
  const std::span<float> value = std::span(values_).subspan(slot * dim, dim);
  if (held.position != position) {
    held = {position, -1};
    take_token(view_, rope_, arithmetic_, position, key, value);
  } else {
    keys_.get_row(slot, key.data());
  }
  code_token(way_down(ladder_, held.rung, rung), key, value);
  keys_.set_row(slot, key.data());
  held.rung = rung;
}

void CodedRows::logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) {
  some_.resize(exact_.size());
  rows.logits(query, head, exact_, some_.data());
  for (std::size_t i = 0; i < exact_.size(); ++i) to[exact_ages_[i]] = some_[i];
  std::vector<float> q(view_.head_size);
  rotate_original(rope_, arithmetic_, view_.query(head, query), view_.head_size, query, q.data());
  butterflies(q);
  by_slot_.resize(keys_.panel_count() * 16);
  multiply_fused(q.data(), 1, view_.head_size, keys_, 0, keys_.panel_count(), by_slot_.data(),
                 by_slot_.size());
  some_.resize(coded_.size());
  for (std::size_t i = 0; i < coded_.size(); ++i) some_[i] = by_slot_[coded_[i]] / kCodeBlock;
  make_scores(some_.data(), some_.size(), arithmetic_.softmax_scale, arithmetic_.softcap);
  for (std::size_t i = 0; i < coded_.size(); ++i) to[coded_ages_[i]] = some_[i];
}

std::span<const float> CodedRows::some_of(std::span<const float> p,
                                          std::span<const std::uint32_t> ages) {
  some_.clear();
  for (const std::uint32_t age : ages) some_.push_back(p[age]);
  return some_;
}

void CodedRows::accumulate(std::span<const float> p, std::span<float> out) {
  const std::uint32_t dim = view_.head_size;
  if (!exact_.empty())
    accumulate_rows(some_of(p, exact_ages_), exact_, view_.v, view_.kv_token_stride, dim,
                    out.data());
  std::vector<float> sum(dim);
  accumulate_rows(some_of(p, coded_ages_), coded_, values_.data(), dim, dim, sum.data());
  butterflies(sum);
  for (std::size_t d = 0; d < dim; ++d) out[d] += sum[d] / kCodeBlock;
}

}  // namespace kvlab
