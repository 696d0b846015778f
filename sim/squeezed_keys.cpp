#include "sim/squeezed_keys.hpp"

#include "traces/row_spec.hpp"

namespace kvlab {

SqueezedKeys::SqueezedKeys(const HeadView& view, const RopeTable& rope,
                           const HeadArithmetic& arithmetic)
    : view_(view),
      rope_(rope),
      arithmetic_(arithmetic),
      keys_(0, view.head_size),
      queries_(std::size_t{view.group} * view.head_size) {}

void SqueezedKeys::place(const LiveSet& live) {
  keys_.grow(live.slot_count());
  placed_.resize(live.slot_count(), kNoBudget);
  tokens_.resize(live.slot_count(), kNoBudget);
  const auto positions = live.positions();
  const auto slots = live.slots();
  old_ = tokens_before_gaps(positions);
  std::vector<float> key(view_.head_size);
  for (std::uint32_t i = 0; i < live.size(); ++i) {
    const std::uint32_t slot = slots[i], place = i < old_ ? i : positions[i];
    if (tokens_[slot] == positions[i] && placed_[slot] == place) continue;
    rope_.rotate(view_.key(positions[i]), view_.head_size, place, key.data());
    keys_.set_row(slot, key.data());
    tokens_[slot] = positions[i];
    placed_[slot] = place;
  }
}

/// Products of the query's heads, rotated to `place`, with the keys of all slots.
void SqueezedKeys::multiply_at(std::uint32_t query, std::uint32_t place,
                               std::vector<float>& by_slot) {
  for (std::uint32_t head = 0; head < view_.group; ++head)
    rope_.rotate(view_.query(head, query), view_.head_size, place,
                 queries_.data() + head * view_.head_size);
  const std::size_t stride = keys_.panel_count() * 16;
  by_slot.resize(view_.group * stride);
  multiply_fused(queries_.data(), view_.group, view_.head_size, keys_, 0, keys_.panel_count(),
                 by_slot.data(), stride);
}

void SqueezedKeys::compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible) {
  multiply_at(query, query, by_position_);
  if (old_ > 0) multiply_at(query, visible - 1, by_number_);
  const std::size_t stride = keys_.panel_count() * 16;
  visible_ = visible;
  by_age_.resize(view_.group * visible_);
  const auto slots = live.slots();
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    float* to = by_age_.data() + head * visible_;
    for (std::uint32_t i = 0; i < visible; ++i)
      to[i] = (i < old_ ? by_number_ : by_position_)[head * stride + slots[i]];
    make_scores(to, visible_, arithmetic_.softmax_scale, arithmetic_.softcap);
  }
}

std::span<const float> SqueezedKeys::logits(std::uint32_t head) const {
  return {by_age_.data() + head * visible_, visible_};
}

}  // namespace kvlab
