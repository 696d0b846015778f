// The live tokens of one cache under the one rule of eviction. Knows no keys and no values: slots
// are numbers, and whoever holds tensors stores a token's key and value at its slot.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "policies/catalogue.hpp"

namespace kvlab {

inline constexpr std::uint32_t kNoBudget = 0xffff'ffffu;  ///< never evicts

/// How many live tokens, the oldest ones, have lost a younger one. `positions`: ascending.
std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions);

class LiveSet {
 public:
  /// Which cache this is: enters Step, hence `random`.
  struct Identity {
    std::uint64_t seed = 0;
    std::uint32_t sequence = 0, layer = 0, kv_head = 0;
  };

  /// `budget` in tokens. Throws std::invalid_argument where the guards do not fit the budget.
  LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity);
  /// The same rule over states from elsewhere: for references, which are not in the registry.
  LiveSet(std::unique_ptr<PolicyStates> states, Needs needs, std::uint32_t budget, Guards guards,
          Identity identity);

  /// Live tokens from the oldest to the youngest, and the slot of each.
  std::span<const std::uint32_t> positions() const { return positions_; }
  std::span<const std::uint32_t> slots() const { return slots_; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(positions_.size()); }
  /// One more than the largest slot ever used.
  std::uint32_t slot_count() const { return slot_count_; }
  std::uint64_t evictions() const { return evictions_; }
  std::uint32_t live_max() const { return live_max_; }

  /// The place of each live token, by age, in the order of leaving, were `now` admitted next.
  std::vector<LeavingKey> leaving_keys(std::uint32_t now) const;
  /// How many tokens make_room would evict.
  std::uint32_t surplus() const {
    return budget_ == kNoBudget || size() < budget_ ? 0 : size() - (budget_ - 1);
  }

  Needs needs() const { return needs_; }
  const PolicyStates& states() const { return *states_; }

  /// Step 1: evicts until at most budget - 1 tokens are live; `now` is the position to be admitted
  /// next. Returns the victims' indices by age, ascending, as they were before leaving.
  std::span<const std::uint32_t> make_room(std::uint32_t now);
  /// Step 2: admits `count` tokens from position `first` on. Reuses freed slots first.
  void admit(std::uint32_t first, std::uint32_t count);
  /// Step 4: seen[i] is what the i-th live token by age received from the last admission.
  void observe(std::span<const Observation> seen);

 private:
  Step step(std::uint32_t now, std::uint32_t queries) const;
  void fill_keys(std::uint32_t now, std::vector<LeavingKey>& keys) const;

  std::unique_ptr<PolicyStates> states_;
  Needs needs_;
  std::uint32_t budget_;
  Guards guards_;
  Identity identity_;
  std::vector<std::uint32_t> positions_, slots_, free_, victims_;
  std::vector<LeavingKey> keys_;
  mutable std::vector<std::uint64_t> ranks_;
  std::uint32_t slot_count_ = 0, live_max_ = 0, admitted_first_ = 0, admitted_count_ = 0;
  std::uint64_t evictions_ = 0;
};

}  // namespace kvlab
