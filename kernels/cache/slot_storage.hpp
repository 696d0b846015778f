// Device memory of a cache that evicts: each KV head of each layer of each sequence has as many
// slots as its budget.
#pragma once

#include "kernels/cache/tier_storage.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// All state that lives from step to step, laid out in device memory. Copies are views.
class SlotStorage {
 public:
  SlotStorage(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots);
  /// Drops all tokens and writes the tables from `slots` and `config`. Synchronizes.
  void clear(const SlotsConfig& config, const PairSlots& slots) const;
  /// Writes the tables of `count` pairs, [layer, pair], starting at `first`. Synchronizes.
  void write_pairs(const PairSlots& slots, std::size_t first, std::size_t count) const;

  /// One layer of the first `sequences` sequences.
  kvlab_cache cache(std::uint32_t layer, int sequences) const;
  kvlab_policy_state policy(std::uint32_t layer) const;
  /// One layer of one sequence.
  kvlab_cache cache_of(std::uint32_t layer, int sequence) const;
  kvlab_policy_state policy_of(std::uint32_t layer, int sequence) const;
  /// policy_of() for a compaction. The compaction evicts to the budget if steps leave eviction to
  /// it, unless `stays` is set.
  kvlab_policy_state policy_of_compact(std::uint32_t layer, int sequence, bool stays) const;
  /// One layer's unit keys, starting at a sequence; null if the features do not need them.
  float* unit_keys_of(std::uint32_t layer, int sequence) const;

  TierStorage tiers;                   ///< used if some cache is quantized; else:
  std::byte *keys, *values;            // [slot, dim]
  std::uint32_t *positions, *ages;     // [slot]; ages only with cache positions, else null
  std::byte* states;                   // [slot, slot_bytes]
  float* features;                     // [slot, feature]: token features
  float* unit_keys;                    // [layer, pair, dim]: see FeatureArgs; null if not needed
  kvlab_observation* seen;             // [slot]: observation of the last step; null unless watched
  std::int64_t* first_slots;           // [layer, pair]
  std::int32_t *lengths, *next_slots;  // [layer, pair]
  kvlab_rule* rules;                   // [layer, pair]
  /// [layer, pair], null without modifiers: the number of live tokens at which a step, or a
  /// compaction, evicts to the budget.
  std::uint32_t *step_evict_at, *compact_evict_at;
  std::uint32_t* never;  // [layer, pair]: kUnlimited
  std::byte* params;     // [sequence, params_bytes]; the next three are [sequence] too
  std::uint32_t *thresholds, *sequence_ids;
  std::uint64_t* seeds;

 private:
  kvlab_cache shape_;         ///< of a layer, without pointers
  const SlotLayer* layers_;   ///< points into the config
  std::size_t pairs_;         ///< per layer
  std::size_t params_bytes_;  ///< per sequence
};

}  // namespace kvlab::kernels
