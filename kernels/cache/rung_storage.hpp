// The memory of tokens on rungs, beside that of their slots.
#pragma once

#include "kernels/cache/pair_slots.hpp"
#include "kernels/codes/coded_cache.hpp"
#include "kernels/host/arena.hpp"

namespace kvlab::kernels {

/// Where all rows lie. Host only.
struct RungPlan {
  RungPlan(const SlotsConfig& config, const PairSlots& slots);

  std::vector<DeviceLadder> ladders;  // [layer, pair]
  std::int64_t rows = 0, bytes = 0;
  int most_rows = 0, most_row_bytes = 0, most_rungs = 0;  ///< as in CodedCache
  std::int64_t padding = 0;  ///< of the bytes: rungs' rows are whole tiles
};

/// Copies are views. Null, all of it, where no cache keeps codes.
struct RungStorage {
  RungStorage() = default;
  RungStorage(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots);
  /// Nothing is on any rung. Waits.
  void clear(const SlotsConfig& config, const PairSlots& slots) const;
  /// As if sequence and layer held so many tokens of each pair; codes of nothing in particular.
  void pretend(const PairSlots& slots, std::size_t at, std::size_t pair, std::uint32_t live) const;

  bool in_use() const { return ladders != nullptr; }
  /// One layer, from a sequence on.
  CodedCache coded(std::uint32_t layer, int sequence) const;

  DeviceLadder* ladders = nullptr;  // [layer, pair], as counts, next_rows, extents
  std::byte* bytes = nullptr;
  std::uint32_t *places = nullptr, *owners = nullptr;  // [slot], [row]
  std::int32_t *counts = nullptr, *extents = nullptr;
  std::uint32_t* next_rows = nullptr;
  std::byte *newest_keys = nullptr, *newest_values = nullptr;  // [pair, dim]
  std::int32_t* nothing = nullptr;                             // [pair]: zeros
  std::int64_t* newest = nullptr;                              // [pair]: 0, 1, 2, …

 private:
  std::size_t pairs_ = 0, kv_heads_ = 0, key_bytes_ = 0;
  int head_size_ = 0, element_ = 0, most_rows_ = 0, most_row_bytes_ = 0, most_rungs_ = 0;
};

}  // namespace kvlab::kernels
