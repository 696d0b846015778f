#include "policies/tally.hpp"

#include <algorithm>
#include <utility>

#include "policies/observation.hpp"

namespace kvlab {

Tally::Tally(const AgedSet& live, std::uint32_t threshold16, std::uint32_t tokens)
    : needs_(live.needs()),
      live_(&live),
      threshold16_(threshold16),
      seen_(needs_ == Needs::nothing ? 0 : tokens),
      largest_(needs_mass(needs_) && live.modifiers().group == Modifiers::Group::max ? tokens : 0),
      requested_(needs_requests(needs_) ? tokens : 0) {}

void Tally::add_row(std::span<const float> p, std::uint32_t age) {
  if (needs_mass(needs_) && age < live_->tail()) {
    const float weight = live_->weight(age);
    if (largest_.empty())
      for (std::size_t i = 0; i < p.size(); ++i) seen_[i].mass += fixed_mass(weight, p[i]);
    else
      for (std::size_t i = 0; i < p.size(); ++i)
        largest_[i] = std::max(largest_[i], fixed_mass(weight, p[i]));
    if (live_->sees_heads()) {
      std::uint64_t* const mass = masses_of(head_);
      for (std::size_t i = 0; i < p.size(); ++i) mass[i] += fixed_mass(weight, p[i]);
    }
  }
  ++head_;
  if (needs_requests(needs_)) {
    const std::uint64_t row_max = fixed_mass(1.0f, *std::max_element(p.begin(), p.end()));
    for (std::size_t i = 0; i < p.size(); ++i)
      requested_[i] |= is_requested(fixed_mass(1.0f, p[i]), row_max, threshold16_);
  }
}

std::uint64_t* Tally::masses_of(std::size_t head) {
  heads_.resize(std::max(heads_.size(), (head + 1) * seen_.size()));
  return heads_.data() + head * seen_.size();
}

void Tally::end_query(std::uint32_t position) {
  head_ = 0;
  for (std::size_t i = 0; i < largest_.size(); ++i) seen_[i].mass += std::exchange(largest_[i], 0);
  for (std::size_t i = 0; i < requested_.size(); ++i) {
    if (!requested_[i]) continue;
    ++seen_[i].requests;
    seen_[i].last_request = position;
    requested_[i] = 0;
  }
}

void Tally::merge(const Tally& part) {
  for (std::size_t i = 0; i < part.seen_.size(); ++i) {
    const Observation& more = part.seen_[i];
    seen_[i].mass += more.mass;
    seen_[i].requests += more.requests;
    seen_[i].last_request = std::max(seen_[i].last_request, more.last_request);
  }
  for (std::size_t i = 0; i < part.heads_.size(); ++i)
    masses_of(i / part.seen_.size())[i % part.seen_.size()] += part.heads_[i];
}

void Tally::set_queries(std::uint32_t count) {
  const std::size_t older = seen_.size() - std::min<std::size_t>(seen_.size(), count);
  for (std::size_t i = 0; i < seen_.size(); ++i)
    seen_[i].queries = i < older ? count : count - static_cast<std::uint32_t>(i - older);
}

}  // namespace kvlab
