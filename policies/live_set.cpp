#include "policies/live_set.hpp"

#include <algorithm>
#include <numeric>

namespace kvlab {

std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions) {
  std::size_t old = positions.empty() ? 0 : positions.size() - 1;
  while (old > 0 && positions[old - 1] + 1 == positions[old]) --old;
  return static_cast<std::uint32_t>(old);
}

LiveSet::LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity)
    : LiveSet(
          spec.entry->make_states(spec.params), spec.entry->info.needs,
          spec.entry->info.evicts ? budget : kNoBudget,
          !spec.entry->info.evicts || budget == kNoBudget ? Guards{} : resolve_guards(spec, budget),
          identity) {}

LiveSet::LiveSet(std::unique_ptr<PolicyStates> states, Needs needs, std::uint32_t budget,
                 Guards guards, Identity identity)
    : states_(std::move(states)),
      needs_(needs),
      budget_(budget),
      guards_(guards),
      identity_(identity) {}

Step LiveSet::step(std::uint32_t now, std::uint32_t queries) const {
  return {.now = now,
          .budget = budget_,
          .live = size(),
          .queries = queries,
          .seed = identity_.seed,
          .sequence = identity_.sequence,
          .layer = identity_.layer,
          .kv_head = identity_.kv_head};
}

void LiveSet::fill_keys(std::uint32_t now, std::vector<LeavingKey>& keys) const {
  ranks_.resize(size());
  states_->rank(slots_, positions_, step(now, 0), ranks_);
  keys.resize(size());
  for (std::uint32_t i = 0; i < size(); ++i)
    keys[i] = {guards_.guard(positions_[i], now), ranks_[i], positions_[i]};
}

std::vector<LeavingKey> LiveSet::leaving_keys(std::uint32_t now) const {
  std::vector<LeavingKey> keys;
  fill_keys(now, keys);
  return keys;
}

std::span<const std::uint32_t> LiveSet::make_room(std::uint32_t now) {
  victims_.clear();
  const std::uint32_t leaving = surplus();
  if (leaving == 0) return victims_;

  fill_keys(now, keys_);
  victims_.resize(size());
  std::iota(victims_.begin(), victims_.end(), 0u);
  const auto first = [&](std::uint32_t a, std::uint32_t b) { return keys_[a] < keys_[b]; };
  if (leaving == 1) {
    victims_[0] = *std::min_element(victims_.begin(), victims_.end(), first);
  } else {
    std::nth_element(victims_.begin(), victims_.begin() + (leaving - 1), victims_.end(), first);
  }
  victims_.resize(leaving);
  std::sort(victims_.begin(), victims_.end());

  std::size_t kept = victims_.front(), next = 0;
  for (std::size_t i = kept; i < positions_.size(); ++i) {
    if (next < victims_.size() && i == victims_[next]) {
      free_.push_back(slots_[i]);
      ++next;
    } else {
      positions_[kept] = positions_[i];
      slots_[kept] = slots_[i];
      ++kept;
    }
  }
  positions_.resize(kept);
  slots_.resize(kept);
  evictions_ += victims_.size();
  return victims_;
}

void LiveSet::admit(std::uint32_t first, std::uint32_t count) {
  const std::size_t old = positions_.size();
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint32_t slot = slot_count_;
    if (free_.empty()) {
      ++slot_count_;
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    positions_.push_back(first + i);
    slots_.push_back(slot);
  }
  states_->reserve(slot_count_);
  const Step now = step(first, count);
  for (std::size_t i = old; i < positions_.size(); ++i)
    states_->admit(slots_[i], Token{positions_[i]}, now);
  live_max_ = std::max(live_max_, size());
  admitted_first_ = first;
  admitted_count_ = count;
}

void LiveSet::observe(std::span<const Observation> seen) {
  if (needs_ == Needs::nothing) return;
  states_->observe(slots_, seen, step(admitted_first_, admitted_count_));
}

}  // namespace kvlab
