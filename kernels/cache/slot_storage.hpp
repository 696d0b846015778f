// The memory of a cache that evicts: each KV head of each layer of each sequence has as many slots
// as its budget.
#pragma once

#include "kernels/cache/tier_storage.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Everything that lives from step to step, laid out in device memory. Copies are views.
class SlotStorage {
 public:
  SlotStorage(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots);
  /// Nothing is live, and the tables are what slots and config say. Waits.
  void clear(const SlotsConfig& config, const PairSlots& slots) const;
  /// The tables of some KV heads, [layer, pair] from the `first` on. Waits.
  void write_pairs(const PairSlots& slots, std::size_t first, std::size_t count) const;

  /// One layer of the first `sequences`.
  kvlab_cache cache(std::uint32_t layer, int sequences) const;
  kvlab_policy_state policy(std::uint32_t layer) const;
  /// One layer of one sequence alone.
  kvlab_cache cache_of(std::uint32_t layer, int sequence) const;
  kvlab_policy_state policy_of(std::uint32_t layer, int sequence) const;
  /// policy_of() for a compaction, which evicts to the budget where a step leaves that to it;
  /// unless `stays`.
  kvlab_policy_state policy_of_compact(std::uint32_t layer, int sequence, bool stays) const;
  /// Of one layer, from a sequence on; null without them.
  float* unit_keys_of(std::uint32_t layer, int sequence) const;

  TierStorage tiers;                ///< where some cache is quantized, else:
  std::byte *keys, *values;         // [slot, dim]
  std::uint32_t *positions, *ages;  // [slot]; ages only where rotated to cache positions, else null
  std::byte* states;                // [slot, slot_bytes]
  float* features;                  // [slot, feature]: what each brought
  float* unit_keys;                 // [layer, pair, dim]: see FeatureArgs; null without them
  kvlab_observation* seen;          // [slot]: what each received; null unless watched
  std::int64_t* first_slots;        // [layer, pair]
  std::int32_t *lengths, *next_slots;  // [layer, pair]
  kvlab_rule* rules;                   // [layer, pair]
  /// [layer, pair], null without modifiers: live tokens at which a step and a compaction evict to
  /// the budget.
  std::uint32_t *step_evict_at, *compact_evict_at;
  std::uint32_t* never;  // [layer, pair]: kUnlimited
  std::byte* params;     // [sequence, params_bytes], as the next three
  std::uint32_t *thresholds, *sequence_ids;
  std::uint64_t* seeds;

 private:
  kvlab_cache shape_;         ///< of a layer, without its memory
  const SlotLayer* layers_;   ///< the config's
  std::size_t pairs_;         ///< of a layer
  std::size_t params_bytes_;  ///< of a sequence
};

}  // namespace kvlab::kernels
