// Device memory of a cache that evicts: each KV head of each layer of each sequence has as many
// slots as its budget.
#pragma once

#include "kernels/cache/tier_storage.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// All state that lives from step to step, laid out in device memory. Copies are views.
class SlotStorage {
 public:
  SlotStorage(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots);
  /// Clears what only needs it once, right after the memory was allocated.
  void initialize(const KvCacheConfig& config, const PairSlots& slots, cudaStream_t stream) const;
  /// Drops the tokens of some sequences, and writes their tables from `slots` and `settings`.
  /// Enqueued on the stream, as are the next calls.
  void start(const PairSlots& slots, std::size_t first_sequence,
             std::span<const SlotSequence> settings, cudaStream_t stream) const;
  /// Copies tokens and states between sequences with the same slots. PairSlots::copy() has been
  /// called.
  void copy(const PairSlots& slots, std::size_t from, std::size_t to, const SlotSequence& settings,
            cudaStream_t stream) const;
  /// Writes the tables of `count` pairs, [layer, pair], starting at `first`.
  void write_pairs(const PairSlots& slots, std::size_t first, std::size_t count,
                   cudaStream_t stream) const;

  /// One layer of the first `sequences` sequences.
  kvlab_cache_view cache(std::uint32_t layer, int sequences) const;
  kvlab_policy_state policy(std::uint32_t layer) const;
  /// One layer of one sequence.
  kvlab_cache_view cache_of(std::uint32_t layer, int sequence) const;
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
  /// Writes params, thresholds, seeds and sequence_ids of a sequence.
  void write_settings(std::size_t first_sequence, std::span<const SlotSequence> settings,
                      cudaStream_t stream) const;

  kvlab_cache_view shape_;   ///< of a layer, without pointers
  const SlotLayer* layers_;  ///< points into the config
  std::uint32_t first_head_;
  std::size_t pairs_;                                   ///< per layer
  std::size_t key_bytes_, slot_bytes_, feature_count_;  ///< per slot
  std::size_t params_bytes_;                            ///< per sequence
};

}  // namespace kvlab::kernels
