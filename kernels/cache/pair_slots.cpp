#include "kernels/cache/pair_slots.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/types.hpp"
#include "policies/rule/live_tokens.hpp"

namespace kvlab::kernels {

PairSlots::PairSlots(const KvCacheConfig& config)
    : kv_heads_(static_cast<std::size_t>(config.kv_heads)),
      own_(config.pairs),
      configured_(config.pairs),
      requested_(config.pairs),
      appended_(std::max(config.draft_tokens, 1u)),
      max_tokens_(config.max_tokens > 0 ? config.max_tokens : kUnlimited) {
  for (const SlotSequence& sequence : config.sequences) modifiers_.push_back(sequence.modifiers);
  for (std::size_t at = 0; at < own_.size(); ++at) {
    const std::size_t pair = at % pairs();
    const std::uint32_t slots = slots_of(pair, own_[at].budget);
    if (slots >= std::uint32_t{1} << 31)
      throw std::invalid_argument("a cache needs a budget or a length; give one of them");
    first_slots_.push_back(total_);
    total_ += slots;
    const bool shares = config.sequences[pair / kv_heads_].share != nullptr;
    const std::uint32_t max_own_slots = shares ? slots_of(pair, own_[at].max_budget) : slots;
    if (std::max(slots, max_own_slots) > kMaxSlots)
      throw std::invalid_argument("a KV head keeps too many tokens; at most 2^30 are supported");
    max_slots_ = std::max(max_slots_, static_cast<int>(max_own_slots));
  }
  configured_first_ = first_slots_;
}

void PairSlots::set_rules(std::size_t sequence, std::span<const SequenceSettings::Rule> rules) {
  std::size_t next = 0;
  each_pair(sequence, [&](std::size_t at) {
    const SlotPair& pair = configured_[at];
    const std::uint32_t budget = rules[next++].budget;
    const bool may_be_smaller = pair.tiers.empty() && pair.budget != kUnlimited;
    if (may_be_smaller ? budget <= pair.budget : budget == pair.budget) return;
    throw std::invalid_argument(fmt::format(
        "rules[{}].budget is {} tokens, but the cache was created for {}; it should be {}",
        next - 1, budget, pair.budget,
        may_be_smaller ? "at most that" : "equal, because the cache has tiers or no budget"));
  });
  next = 0;
  each_pair(sequence, [&](std::size_t at) {
    requested_[at].budget = rules[next].budget;
    requested_[at].protected_tokens = rules[next++].protected_tokens;
  });
}

void PairSlots::reset(std::size_t sequence) {
  each_pair(sequence, [&](std::size_t at) {
    own_[at] = requested_[at];
    first_slots_[at] = configured_first_[at];
  });
}

void PairSlots::copy(std::size_t from, std::size_t to) {
  const auto other = [&](std::size_t at) {
    return at + (to - from) * kv_heads_;
  };  // the difference may wrap around
  bool alike = modifiers_[from] == modifiers_[to];
  each_pair(from, [&](std::size_t at) {
    alike = alike && configured_[at].has_slots_of(configured_[other(at)]);
  });
  if (!alike)
    throw std::invalid_argument(
        fmt::format("sequences {} and {} were created with different budgets, tiers or modifiers; "
                    "they should be equal",
                    from, to));
  each_pair(from, [&](std::size_t at) {
    const std::size_t target = other(at);
    own_[target] = own_[at];
    requested_[target] = requested_[at];
    first_slots_[target] = configured_first_[target] + first_slots_[at] - configured_first_[at];
  });
}

PairSlots::Range PairSlots::range(std::uint32_t layer, std::size_t sequence) const {
  const std::size_t at = layer * pairs() + sequence * kv_heads_, end = at + kv_heads_;
  const std::int64_t first = configured_first_[at];
  return {first, (end < configured_first_.size() ? configured_first_[end] : total_) - first};
}

std::int64_t PairSlots::max_slots_of_layer() const {
  std::int64_t largest = 0;
  for (std::uint32_t layer = 0; layer * pairs() < own_.size(); ++layer)
    largest = std::max(largest, end_of_layer(layer) - range(layer, 0).first);
  return largest;
}

std::uint32_t PairSlots::slots_of(std::size_t pair, std::uint32_t budget) const {
  const Modifiers& own = modifiers(pair);
  if (budget == kUnlimited || own.once) return max_tokens_;
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(own.capacity(budget, appended_), max_tokens_));
}

std::vector<TierSlots> PairSlots::tiers(std::uint32_t layer, std::size_t pair) const {
  const SlotPair& own = own_[layer * pairs() + pair];
  return own.tiers.empty() ? std::vector{TierSlots{.slots = own.budget}} : own.tiers;
}

/// The first tier also has rows for tokens that are waiting for eviction.
std::uint32_t PairSlots::rows(std::size_t pair, std::span<const TierSlots> tiers,
                              std::size_t tier) const {
  return tier == 0 ? slots_of(pair, tiers[0].slots) : std::min(tiers[tier].slots, max_tokens_);
}

/// The memory suffices, because the sum of the budgets is the same as before, and no head gets more
/// slots than a sequence has tokens.
void PairSlots::share(std::uint32_t layer, std::size_t sequence,
                      std::span<const std::uint32_t> budgets) {
  const std::size_t first = layer * pairs() + sequence * kv_heads_;
  std::int64_t slot = first_slots_[first];
  for (std::size_t head = 0; head < kv_heads_; ++head) {
    own_[first + head].budget = budgets[head];
    first_slots_[first + head] = slot;
    slot += slots_of(sequence * kv_heads_ + head, budgets[head]);
  }
}

std::uint32_t PairSlots::max_tokens(std::size_t sequence) const {
  const Modifiers& own = modifiers_[sequence];
  std::uint32_t tokens = kUnlimited;
  each_pair(sequence, [&](std::size_t at) {
    const std::uint32_t budget = own_[at].budget;
    if (budget == kUnlimited || own.once || own.capacity(budget, appended_) > max_tokens_)
      tokens = max_tokens_;
  });
  return tokens;
}

std::uint32_t PairSlots::older(std::uint32_t layer, std::size_t pair, std::uint32_t fed) const {
  return live_before_append(fed, budget(layer, pair));
}

}  // namespace kvlab::kernels
