// Device memory for tokens on tiers. It is used in addition to the slots.
#pragma once

#include "kernels/cache/pair_slots.hpp"
#include "kernels/host/arena.hpp"
#include "kernels/quantized/quantized_cache.hpp"
#include "policies/tiers/tier_counts.hpp"

namespace kvlab::kernels {

/// Where the rows of a pair begin and how many there are, and the same for the bytes of these rows.
struct TierRegion {
  std::int64_t first_row, rows, first_byte, bytes;
};

/// The layout of the rows of all pairs. Computed on the host only.
struct TierLayout {
  TierLayout(const KvCacheConfig& config, const PairSlots& slots);

  std::vector<DeviceTierPlan> tier_plans;  // [layer, pair]
  std::vector<TierRegion> regions;         // [layer, pair]
  std::int64_t rows = 0, bytes = 0;
  int max_rows = 0, max_row_bytes = 0, max_tiers = 0;  ///< see QuantizedCache
  std::int64_t padding = 0;  ///< bytes that only pad the rows of tiers to whole tiles
};

/// Copies of this object are views. All pointers are null if no cache is quantized.
struct TierStorage {
  TierStorage() = default;
  TierStorage(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots);
  /// Writes the tables that stay the same as long as the memory exists. This and the next two
  /// functions enqueue their work on the stream.
  void initialize(const KvCacheConfig& config, const PairSlots& slots, cudaStream_t stream) const;
  /// Removes the tokens of `count` pairs. `first`: index of the first pair in [layer, pair].
  void start(std::size_t first, std::size_t count, cudaStream_t stream) const;
  /// Copies the tokens of `count` pairs to pairs with the same tiers. Does not copy row_of_slot.
  void copy(std::size_t from, std::size_t to, std::size_t count, cudaStream_t stream) const;
  /// For benchmarks: marks `live` tokens of a pair as stored. Their quantized values are arbitrary.
  void pretend(const PairSlots& slots, std::size_t at, const TierCounts& live) const;

  /// The centres of one sequence in one layer; null if no keys are centred.
  float* centres_of(std::uint32_t layer, int sequence) const;
  bool in_use() const { return tier_plans != nullptr; }
  /// The quantized caches of one layer, for this sequence and all later ones.
  QuantizedCache quantized_cache(std::uint32_t layer, int sequence) const;

  DeviceTierPlan* tier_plans = nullptr;  // [layer, pair], like counts, next_rows and extents
  std::byte* bytes = nullptr;
  std::uint32_t *row_of_slot = nullptr, *slot_of_row = nullptr;  // see QuantizedCache
  std::int32_t *counts = nullptr, *extents = nullptr;
  std::uint32_t* next_rows = nullptr;
  // [pair, dim]: a step's new tokens, until store_newest() stores them in rows
  std::byte *newest_keys = nullptr, *newest_values = nullptr;
  /// [layer, pair, dim]; zeros for a pair without a centre. Null: no keys are centred.
  float* centres = nullptr;
  /// The centres of a sequence without tokens, [layer, pair, dim]; null: zeros.
  float* constant_centres = nullptr;
  // With these two, newest_keys and newest_values are a cache view with one slot for each pair:
  // `nothing` are its next_slots, all 0, and `newest` its first_slot: 0, 1, 2, …
  std::int32_t* nothing = nullptr;  // [pair]
  std::int64_t* newest = nullptr;   // [pair]

 private:
  std::vector<TierRegion> regions_ = {};  // [layer, pair]
  std::size_t pairs_ = 0, kv_heads_ = 0, key_bytes_ = 0;
  int head_size_ = 0, element_ = 0, max_rows_ = 0, max_row_bytes_ = 0, max_tiers_ = 0;
};

}  // namespace kvlab::kernels
