// The memory of a cache that evicts: each KV head of each layer of each sequence has as many slots
// as its budget.
#pragma once

#include <vector>

#include "engine/cuda/cache/pair_slots.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/evict/eviction.hpp"
#include "kernels/host/arena.hpp"

namespace kvlab {

/// How keys are cached, and rotated when attention reads them.
enum class KeyRotation {
  by_position,  ///< cached rotated at their original positions, and left so
  by_age,       ///< cached before RoPE, beside their ages; rotated by age
  two_frames    ///< cached as by_position, numbered by age: see EvictingAttentionArgs
};

struct EvictingOptions {
  /// [sequence]: all of one policy and one numbering of positions; the rest may differ.
  std::vector<CacheOptions> caches;
  std::uint32_t most_tokens = 0;  ///< of any sequence; 0: no limit
  int part_tokens = 1;            ///< of a prompt that go through a layer together
  /// Live and new tokens of the longest admission, where it is known: for bytes(). 0: it grows.
  std::uint32_t longest_admission = 0;
  bool watched = false;  ///< keep what each live token received
  bool plain = false;    ///< by the plain kernels, where the fast ones would do

  const std::shared_ptr<const PolicyEntry>& entry() const { return caches.front().policy.entry; }
  const PolicyInfo& policy() const { return entry()->info; }
  bool observes() const { return policy().needs != Needs::nothing; }
  int sequences() const { return static_cast<int>(caches.size()); }
  /// Most rows that go through a layer together.
  int rows() const { return std::max(part_tokens, sequences()); }
  KeyRotation rotation() const {
    if (caches.front().positions == Positions::original) return KeyRotation::by_position;
    return policy().oldest_first ? KeyRotation::two_frames : KeyRotation::by_age;
  }
};

/// Everything that lives from step to step, laid out in device memory. Copies are views.
class SlotStorage {
 public:
  SlotStorage(cuda::Arena& arena, const DeviceModel& model, const PairSlots& slots,
              const EvictingOptions& options);
  /// Nothing is live, and the tables are what slots and options say. Waits.
  void clear(const PairSlots& slots, const EvictingOptions& options) const;

  /// One layer of the first `sequences`.
  kernels::SlotCache cache(std::uint32_t layer, int sequences) const;
  kernels::PolicyState policy(std::uint32_t layer) const;
  /// The same of one sequence alone.
  kernels::SlotCache cache_of(std::uint32_t layer, int sequence) const;
  kernels::PolicyState policy_of(std::uint32_t layer, int sequence) const;

  std::byte *keys, *values;            // [slot, dim]
  std::uint32_t *positions, *ages;     // [slot]; ages only where rotated by age, else null
  std::byte* states;                   // [slot, slot_bytes]
  Observation* seen;                   // [slot]: what each received; null unless watched
  std::int64_t* first_slots;           // [layer, pair]
  std::int32_t *lengths, *next_slots;  // [layer, pair]
  kernels::PairRule* rules;            // [layer, pair]
  std::byte* params;                   // [sequence, params_bytes], as the next three
  std::uint32_t *thresholds, *sequence_ids;
  std::uint64_t* seeds;

 private:
  kernels::SlotCache shape_;  ///< of a layer, without its memory
  std::size_t pairs_;         ///< of a layer
  std::size_t params_bytes_;  ///< of a sequence
};

}  // namespace kvlab
