#include "sim/coded_rows.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "traces/base/numeric/code.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

CodedRows::CodedRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic) {
  if (view.head_size % kCodeBlock != 0)
    throw std::invalid_argument("a ladder of codes: heads of " + std::to_string(view.head_size) +
                                " channels; whole blocks of 32 are expected");
}

void CodedRows::place(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) {
  ladder_ = live.ladder();
  codes_.resize(ladder_.size());
  exact_.clear(), exact_ages_.clear(), coded_.clear(), code_.clear();
  for (std::uint32_t age = 0; age < visible; ++age) {
    const std::uint32_t position = live.positions()[age];
    if (position >= exact_from || live.form(age).exact()) {
      exact_.push_back(position);
      exact_ages_.push_back(age);
    } else {
      coded_.push_back(age);
      code_.push_back(&code_of(position, live.rung(age)));
    }
  }
}

const CodedRows::Code& CodedRows::code_of(std::uint32_t position, std::size_t rung) {
  const auto [at, is_new] = codes_[rung].try_emplace(position);
  Code& code = at->second;
  if (!is_new) return code;
  const KvForm& form = *ladder_[rung].form;
  if (rung > 0 && !ladder_[rung - 1].form->exact()) {
    code = code_of(position, rung - 1);
    if (*ladder_[rung - 1].form == form) return code;
  } else {
    code.key.resize(view_.head_size);
    rotate_original(rope_, arithmetic_, view_.key(position), view_.head_size, position,
                    code.key.data());
    const float* const value = view_.v + position * view_.kv_token_stride;
    code.value.assign(value, value + view_.head_size);
    butterflies(code.key);
    butterflies(code.value);
  }
  code_row(code.key, form.key_bits, form.floating);
  code_row(code.value, form.value_bits, form.floating);
  return code;
}

void CodedRows::logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) {
  some_.resize(std::max(exact_.size(), coded_.size()));
  rows.logits(query, head, exact_, some_.data());
  for (std::size_t i = 0; i < exact_.size(); ++i) to[exact_ages_[i]] = some_[i];
  std::vector<float> q(view_.head_size);
  rotate_original(rope_, arithmetic_, view_.query(head, query), view_.head_size, query, q.data());
  butterflies(q);
  for (std::size_t i = 0; i < coded_.size(); ++i)
    some_[i] = dot_fused(q.data(), code_[i]->key.data(), view_.head_size) / kCodeBlock;
  scale(some_.data(), coded_.size(), arithmetic_.softmax_scale);
  for (std::size_t i = 0; i < coded_.size(); ++i) to[coded_[i]] = some_[i];
}

void CodedRows::accumulate(std::span<const float> p, std::span<float> out) {
  some_.clear();
  for (const std::uint32_t age : exact_ages_) some_.push_back(p[age]);
  accumulate_rows(some_, exact_, view_.v, view_.kv_token_stride, view_.head_size, out.data());
  std::vector<float> sum(view_.head_size);
  for (std::size_t i = 0; i < coded_.size(); ++i)
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += p[coded_[i]] * code_[i]->value[d];
  butterflies(sum);
  for (std::size_t d = 0; d < sum.size(); ++d) out[d] += sum[d] / kCodeBlock;
}

}  // namespace kvlab
