// Device memory of caches that evict: the slots of all KV heads of all sequences in all layers.
// PairSlots says how many slots each of them has, and where they begin.
#pragma once

#include "kernels/cache/tier_storage.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// The layout in device memory of all state that lasts from step to step. Copies of this object are
/// views.
class SlotStorage {
 public:
  SlotStorage(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots);
  /// Writes the memory that must be written once after allocation.
  void initialize(const KvCacheConfig& config, const PairSlots& slots, cudaStream_t stream) const;
  /// Drops the tokens of some sequences, and writes their tables from `slots` and `settings`. This
  /// and the next functions enqueue their work on the stream.
  void start(const PairSlots& slots, std::size_t first_sequence,
             std::span<const SlotSequence> settings, cudaStream_t stream) const;
  /// Copies tokens and states between sequences that have the same slots. Call PairSlots::copy()
  /// first. Keys and values in the caller's blocks are not copied.
  void copy(const PairSlots& slots, std::size_t from, std::size_t to, const SlotSequence& settings,
            cudaStream_t stream) const;
  /// Writes the tables of `count` pairs. `first`: index of the first pair in [layer, pair].
  void write_pairs(const PairSlots& slots, std::size_t first, std::size_t count,
                   cudaStream_t stream) const;

  /// The cache of one layer, for the first `sequences` sequences.
  kvlab_cache_view cache(std::uint32_t layer, int sequences) const;
  kvlab_policy_state policy(std::uint32_t layer) const;
  /// The cache of one layer, for one sequence.
  kvlab_cache_view cache_of(std::uint32_t layer, int sequence) const;
  kvlab_policy_state policy_of(std::uint32_t layer, int sequence) const;
  /// The policy state for a compaction of one sequence in one layer. If some sequence has
  /// modifiers, the compaction evicts at compact_evict_at live tokens or, if `stays` is set, never.
  /// Without modifiers it evicts to the budget.
  kvlab_policy_state policy_of_compact(std::uint32_t layer, int sequence, bool stays) const;
  /// The unit keys of one layer, for this sequence and all later ones; null if no feature needs
  /// them.
  float* unit_keys_of(std::uint32_t layer, int sequence) const;

  TierStorage tiers;  ///< keys and values if some cache is quantized
  // [slot, dim]. If some cache is quantized, TierStorage has the tokens, and these point to the
  // newest keys and values, [pair, dim]. Null if keys and values are in the caller's blocks.
  std::byte *keys, *values;
  std::uint32_t *positions, *ages;  // [slot]; ages only with cache positions, otherwise null
  std::byte* states;                // [slot, slot_bytes]
  float* features;                  // [slot, feature]: token features
  float* unit_keys;                 // [layer, pair, dim]: see FeatureArgs; null if not needed
  kvlab_observation* seen;    // [slot]: observation of the last step; null unless config.watched
  std::int64_t* first_slots;  // [layer, pair]: index of the pair's first slot in arrays [slot]
  // [layer, pair]. `lengths`: number of live tokens, which includes the victim that a step has
  // chosen. `next_slots`: the slot of the next token, counted from the pair's first slot
  std::int32_t *lengths, *next_slots;
  kvlab_rule* rules;  // [layer, pair]
  /// [layer, pair], null without modifiers: number of live tokens at which a step or a compaction
  /// evicts to the budget.
  std::uint32_t *step_evict_at, *compact_evict_at;
  std::uint32_t* never;  // [layer, pair]: kUnlimited, so that nothing is evicted
  std::byte* params;     // [sequence, params_bytes]; the next three are [sequence]
  std::uint32_t *thresholds, *sequence_ids;
  std::uint64_t* seeds;

 private:
  /// Writes params, thresholds, seeds and sequence_ids of a sequence.
  void write_settings(std::size_t first_sequence, std::span<const SlotSequence> settings,
                      cudaStream_t stream) const;

  kvlab_cache_view shape_;   ///< one layer's cache, without pointers
  const SlotLayer* layers_;  ///< points into the config
  kvlab_pages pages_;        ///< the caller's blocks, if there are any
  std::uint32_t first_head_;
  std::size_t pairs_;                                   ///< per layer
  std::size_t key_bytes_, slot_bytes_, feature_count_;  ///< per slot
  std::size_t params_bytes_;                            ///< per sequence
};

}  // namespace kvlab::kernels
