#include "sim/lanes/feedback/aged_cache.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace kvlab {

AgedCache::AgedCache(const PolicySpec& spec, std::uint32_t budget, Guards guards,
                     LiveSet::Identity identity, std::uint32_t tokens)
    : loops_(*policy_loops(*spec.entry)),
      needs_(spec.entry->info.needs),
      budget_(spec.entry->info.evicts ? budget : kNoBudget),
      guards_(guards),
      identity_(identity),
      params_(loops_.params_bytes),
      bits_((tokens + 63) / 64) {
  loops_.read_params(spec.params.data(), params_.data());
}

std::size_t AgedCache::following() const {
  const auto live = positions();
  std::size_t first = 0, last = live.size();  // the tokens before `first` do not
  while (first < last) {
    const std::size_t middle = first + (last - first) / 2;
    if (live.back() - live[middle] == live.size() - 1 - middle)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

Step AgedCache::step(std::uint32_t now, std::uint32_t queries) const {
  return {.now = now,
          .budget = budget_,
          .live = size_,
          .queries = queries,
          .seed = identity_.seed,
          .sequence = identity_.sequence,
          .layer = identity_.layer,
          .kv_head = identity_.kv_head};
}

void AgedCache::reserve(std::size_t count) {
  if (count <= positions_.size()) return;
  positions_.resize(count + count / 4);
  states_.resize(positions_.size() * loops_.slot_bytes);
}

std::uint32_t AgedCache::make_room(std::uint32_t now) {
  if (budget_ == kNoBudget || size_ < budget_) return 0;
  const std::uint32_t leaving = size_ - (budget_ - 1);
  if (leaving == 1)
    evict(last_victim_ = one_victim(now));
  else
    evict_many(now, leaving);
  evictions_ += leaving;
  return leaving;
}

/// By age, the sinks come first and the recent last: where the tokens begin that are neither, and
/// where they end.
std::pair<std::size_t, std::size_t> AgedCache::unguarded(std::uint32_t now) const {
  const auto guard_at = [&](std::size_t i) { return guards_.guard(positions_[i], now); };
  std::size_t first = std::min(guards_.sinks, size_);
  while (first > 0 && guard_at(first - 1) != 2) --first;  // where some sinks are not there
  // The recent tokens are there, less those that come next, unless a guard had to give way.
  std::size_t last = std::max<std::size_t>(first, size_ - std::min(guards_.recent, size_));
  while (last < size_ && guard_at(last) == 0) ++last;
  while (last > first && guard_at(last - 1) != 0) --last;
  return {first, last};
}

/// The first of equal ranks is the oldest.
std::size_t AgedCache::one_victim(std::uint32_t now) const {
  const auto [first, last] = unguarded(now);
  const auto among = [&](std::size_t from, std::size_t to) {
    return loops_.first_least(states_.data(), positions_.data(), from, to, params_.data(),
                              step(now, 0));
  };
  if (first < last) return among(first, last);
  return last < size_ ? among(last, size_) : among(0, first);
}

void AgedCache::evict(std::size_t index) {
  const std::uint32_t position = positions_[index];
  bits_[position / 64] &= ~(std::uint64_t{1} << position % 64);
  const std::size_t younger = size_ - 1 - index;
  std::memmove(&positions_[index], &positions_[index] + 1, younger * sizeof(std::uint32_t));
  std::memmove(slot(index), slot(index + 1), younger * loops_.slot_bytes);
  --size_;
}

void AgedCache::evict_many(std::uint32_t now, std::uint32_t leaving) {
  std::vector<std::uint64_t> ranks(size_);
  loops_.rank(states_.data(), positions_.data(), size_, params_.data(), step(now, 0), ranks.data());
  std::vector<std::uint32_t> order(size_);
  std::iota(order.begin(), order.end(), 0u);
  const auto key = [&](std::uint32_t i) {
    return LeavingKey{guards_.guard(positions_[i], now), ranks[i], positions_[i]};
  };
  std::nth_element(order.begin(), order.begin() + (leaving - 1), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
  std::sort(order.begin(), order.begin() + leaving);
  std::size_t kept = order[0], next = 0;
  for (std::size_t i = kept; i < size_; ++i) {
    if (next < leaving && i == order[next]) {
      bits_[positions_[i] / 64] &= ~(std::uint64_t{1} << positions_[i] % 64);
      ++next;
      continue;
    }
    positions_[kept] = positions_[i];
    std::memcpy(slot(kept), slot(i), loops_.slot_bytes);
    ++kept;
  }
  size_ = static_cast<std::uint32_t>(kept);
}

void AgedCache::admit(std::uint32_t first, std::uint32_t count) {
  reserve(size_ + count);
  const std::uint32_t old = size_;
  for (std::uint32_t position = first; position < first + count; ++position) {
    positions_[size_++] = position;
    bits_[position / 64] |= std::uint64_t{1} << position % 64;
  }
  loops_.admit(slot(old), positions_.data() + old, count, params_.data(), step(first, count));
  live_max_ = std::max(live_max_, size_);
  admitted_first_ = first;
  admitted_count_ = count;
}

void AgedCache::observe(const Seen& seen) {
  if (needs_ == Needs::nothing) return;
  loops_.observe(states_.data(), seen, size_, params_.data(),
                 step(admitted_first_, admitted_count_));
}

}  // namespace kvlab
