// Attention that observes: the part that is the same for every policy. Not for callers of the
// library.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/eviction.hpp"
#include "kernels/evict/rung_choice.cuh"

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
  bool by_age;             ///< ages are kept
  int chunks;              ///< blocks of a pair
  Leaving* leaving;        // [pair, chunk, rung]: who leaves first of each block's slots
  std::int32_t* observed;  // [pair], zero between launches
  RungChoice choice;
};

/// The layers of one launch, a kernel's parameter.
struct ObservePlans {
  ObservePlan layers[kMostObservedLayers];
};

}  // namespace kvlab::kernels
