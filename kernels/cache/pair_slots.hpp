// How many slots each KV head of each layer of each sequence has, and where they begin. Host only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cache/slots_config.hpp"

namespace kvlab::kernels {

/// A pair is one KV head of one sequence; every layer has all pairs.
class PairSlots {
 public:
  /// Throws std::invalid_argument where a cache has no bound at all.
  explicit PairSlots(const SlotsConfig& config);

  std::size_t pairs() const { return modifiers_.size() * kv_heads_; }  ///< of a layer
  std::size_t all() const { return own_.size(); }                      ///< pairs, all layers
  std::int64_t total() const { return total_; }                        ///< slots, all layers
  int most() const { return most_; }                                   ///< of a pair
  std::uint32_t budget(std::uint32_t layer, std::size_t pair) const {
    return own_[layer * pairs() + pair].budget;
  }
  /// Of the budget that was asked for.
  Guards guards(std::uint32_t layer, std::size_t pair) const {
    return own_[layer * pairs() + pair].guards;
  }
  /// What the KV heads of a sequence have in a layer from now on, in the room that they have
  /// together.
  void share(std::uint32_t layer, std::size_t sequence, std::span<const std::uint32_t> budgets);
  /// The ladder of a KV head, and how many rows a rung of it takes at most.
  std::vector<RungSlots> rungs(std::uint32_t layer, std::size_t pair) const;
  std::uint32_t rows(std::size_t pair, std::span<const RungSlots> rungs, std::size_t rung) const;
  const Modifiers& modifiers(std::size_t pair) const { return modifiers_[pair / kv_heads_]; }
  /// [layer, pair], in slots from the cache's begin.
  const std::vector<std::int64_t>& first_slots() const { return first_slots_; }
  /// That a sequence may have: no limit where each pair has room for what it keeps.
  std::uint32_t most_tokens() const;
  /// How many tokens are still live when more are admitted behind `fed`, without modifiers.
  std::uint32_t older(std::uint32_t layer, std::size_t pair, std::uint32_t fed) const;

 private:
  std::uint32_t slots_of(std::size_t pair, std::uint32_t budget) const;

  std::size_t kv_heads_;
  std::vector<Modifiers> modifiers_;  // [sequence]
  std::vector<SlotPair> own_;         // [layer, pair]
  std::uint32_t most_tokens_;
  std::vector<std::int64_t> first_slots_;
  std::int64_t total_ = 0;
  int most_ = 0;
};

}  // namespace kvlab::kernels
