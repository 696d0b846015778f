// Attention that observes: the part that is the same for every policy. Not for callers of the
// library.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/eviction.hpp"
#include "kernels/evict/tier_choice.cuh"

namespace kvlab::kernels {

inline constexpr int kObserveThreads = 256;
inline constexpr int kObservedSlots = 4;  ///< of a thread
inline constexpr int kL2Line = 128;       ///< bytes

/// What is observed of one layer: what its attention was given, and what it left.
struct ObservePlan {
  EvictingAttentionArgs args;
  PairTable table;
  PairRows rows;
  std::int64_t row_slots;  ///< of PairRows::logits
  int group;
  bool cache_positions;  ///< ages are kept
  int chunks;            ///< blocks of a pair
  EvictionCandidate*
      candidates;  // [pair, chunk, tier]: which token is evicted first of each block's slots
  std::int32_t* observed;  // [pair], zero between launches
  TierChoice choice;
};

/// The layers of one launch, a kernel's parameter.
struct ObservePlans {
  ObservePlan layers[kMaxObservedLayers];
};

}  // namespace kvlab::kernels
