#include "policies/live_set.hpp"

#include <numeric>

namespace kvlab {

std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions) {
  std::size_t old = positions.empty() ? 0 : positions.size() - 1;
  while (old > 0 && positions[old - 1] + 1 == positions[old]) --old;
  return static_cast<std::uint32_t>(old);
}

LiveSet::LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity)
    : AgedSet(
          spec, budget,
          !spec.entry->info.evicts || budget == kNoBudget ? Guards{} : resolve_guards(spec, budget),
          identity) {}

std::span<const std::uint32_t> LiveSet::make_room(std::uint32_t now) {
  const auto victims = find_victims(now);
  if (victims.empty()) return victims;
  std::size_t kept = victims.front(), next = 0;
  for (std::size_t age = kept; age < slots_.size(); ++age) {
    if (next < victims.size() && age == victims[next]) {
      free_.push_back(slots_[age]);
      ++next;
    } else {
      slots_[kept++] = slots_[age];
    }
  }
  slots_.resize(kept);
  evict(victims);
  return victims;
}

void LiveSet::admit(std::uint32_t first, std::uint32_t count, const float* brought) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      slots_.push_back(slot_count_++);
    } else {
      slots_.push_back(free_.back());
      free_.pop_back();
    }
  }
  AgedSet::admit(first, count, brought);
}

std::vector<std::uint32_t> LiveSet::renumber() {
  std::vector<std::uint32_t> before(slots_.size());
  std::iota(before.begin(), before.end(), 0u);
  before.swap(slots_);
  slot_count_ = size();
  free_ = std::vector<std::uint32_t>();
  give_back();
  return before;
}

}  // namespace kvlab
