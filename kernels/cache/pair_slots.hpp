// Computes how many slots each KV head of each sequence has in each layer, and where they begin.
// Runs on the host only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cache/kv_cache_config.hpp"

namespace kvlab::kernels {

/// A pair is one KV head of one sequence; every layer has all pairs. A pair has a slot for each
/// token that can be live at once (Modifiers::capacity()): as many as its budget, and more with
/// `every` or drafts. With `once`, or without a budget, it has a slot for each token of the longest
/// sequence.
class PairSlots {
 public:
  /// Throws std::invalid_argument if nothing bounds the number of slots of a cache.
  explicit PairSlots(const KvCacheConfig& config);

  std::size_t pairs() const { return modifiers_.size() * kv_heads_; }  ///< of one layer
  std::size_t all() const { return own_.size(); }  ///< number of pairs in all layers
  std::int64_t total() const { return total_; }    ///< number of slots in all layers
  int max_slots() const { return max_slots_; }     ///< maximum number of slots of a pair
  std::uint32_t budget(std::uint32_t layer, std::size_t pair) const {
    return own_[layer * pairs() + pair].budget;
  }
  /// The protected tokens of a pair. They fit the pair's budget as it was before any share().
  ProtectedTokens protected_tokens(std::uint32_t layer, std::size_t pair) const {
    return own_[layer * pairs() + pair].protected_tokens;
  }
  /// Sets the budgets and protected tokens, [layer, kv_head], that a sequence has from the next
  /// reset() on. Throws std::invalid_argument, and changes nothing, if a pair has too few slots.
  void set_rules(std::size_t sequence, std::span<const SequenceSettings::Rule> rules);
  /// Restores the budgets and slots that the pairs of a sequence had before any share().
  void reset(std::size_t sequence);
  /// Copies the budgets, and the split of slots among heads, from sequence `from` to sequence `to`.
  /// Throws std::invalid_argument unless both sequences have the same configuration.
  void copy(std::size_t from, std::size_t to);
  /// All slots of a sequence in a layer. The slots of its pairs follow one another.
  struct Range {
    std::int64_t first, count;
  };
  Range range(std::uint32_t layer, std::size_t sequence) const;
  /// Index of the slot after the last slot of a layer.
  std::int64_t end_of_layer(std::uint32_t layer) const {
    const Range last = range(layer, modifiers_.size() - 1);
    return last.first + last.count;
  }
  /// Maximum number of slots of a layer.
  std::int64_t max_slots_of_layer() const;
  /// Sets the budgets of a sequence's KV heads in a layer, and divides the slots of the layer among
  /// the heads accordingly.
  void share(std::uint32_t layer, std::size_t sequence, std::span<const std::uint32_t> budgets);
  /// The tier plan of a KV head, with the maximum number of rows of each tier.
  std::vector<TierSlots> tiers(std::uint32_t layer, std::size_t pair) const;
  std::uint32_t rows(std::size_t pair, std::span<const TierSlots> tiers, std::size_t tier) const;
  const Modifiers& modifiers(std::size_t pair) const { return modifiers_[pair / kv_heads_]; }
  /// [layer, pair]: offset in slots from the start of the cache.
  const std::vector<std::int64_t>& first_slots() const { return first_slots_; }
  /// Maximum number of tokens of the sequence; unlimited if each of its pairs has enough slots for
  /// the tokens that the pair's budget keeps.
  std::uint32_t max_tokens(std::size_t sequence) const;
  /// Number of tokens that are still live when new ones are appended after `fed` tokens, if the
  /// sequence has no modifiers.
  std::uint32_t older(std::uint32_t layer, std::size_t pair, std::uint32_t fed) const;

 private:
  /// Number of slots that a pair needs for this budget.
  std::uint32_t slots_of(std::size_t pair, std::uint32_t budget) const;
  /// Calls each(index) for the pairs of a sequence in all layers, with their index in [layer,
  /// pair].
  template <class Each>
  void each_pair(std::size_t sequence, Each each) const {
    for (std::size_t at = sequence * kv_heads_; at < own_.size(); at += pairs())
      for (std::size_t pair = at; pair < at + kv_heads_; ++pair) each(pair);
  }

  std::size_t kv_heads_;
  std::vector<Modifiers> modifiers_;  // [sequence]
  std::vector<SlotPair> own_;         // [layer, pair]: current values
  std::vector<SlotPair> configured_;  // [layer, pair]: values for which the memory was allocated
  std::vector<SlotPair> requested_;   // [layer, pair]: values that reset() restores
  std::uint32_t appended_;  // maximum number of new tokens in the slots after the live ones
  std::uint32_t max_tokens_;
  std::vector<std::int64_t> first_slots_, configured_first_;
  std::int64_t total_ = 0;
  int max_slots_ = 0;
};

}  // namespace kvlab::kernels
