// The live tokens of one cache, and a slot for each. Knows no keys and no values: slots are
// numbers, and whoever holds tensors stores a token's key and value at its slot.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"

namespace kvlab {

/// How many live tokens, the oldest ones, have lost a younger one. `positions`: ascending.
std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions);

class LiveSet : public AgedSet {
 public:
  /// `budget` in tokens. Throws std::invalid_argument where the guards do not fit the budget.
  LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity);
  /// A set under other hooks than the registry's, whose parameters are `params`.
  LiveSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget, Guards guards,
          Identity identity)
      : AgedSet(ops, std::move(params), budget, guards, identity) {}

  /// By age.
  std::span<const std::uint32_t> slots() const { return slots_; }
  /// One more than the largest slot ever used.
  std::uint32_t slot_count() const { return slot_count_; }

  /// Step 1: evicts until at most budget - 1 tokens are live; `now` is the position to be admitted
  /// next. Returns the victims' ages, ascending, as they were before leaving.
  std::span<const std::uint32_t> make_room(std::uint32_t now);
  /// Step 2: admits `count` tokens from position `first` on, as AgedSet does. Reuses freed slots
  /// first.
  void admit(std::uint32_t first, std::uint32_t count, const float* brought = nullptr);
  /// Numbers the slots 0, 1, 2, … by age and gives back the memory of tokens that have left.
  /// Returns which slots they were, by age.
  std::vector<std::uint32_t> renumber();

 private:
  std::vector<std::uint32_t> slots_, free_;
  std::uint32_t slot_count_ = 0;
};

}  // namespace kvlab
