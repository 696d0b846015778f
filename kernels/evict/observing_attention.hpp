// Attention that also observes: declarations that are the same for every policy. Internal to the
// library.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/eviction.hpp"
#include "kernels/evict/tier_choice.cuh"

namespace kvlab::kernels {

inline constexpr int kObserveThreads = 256;
inline constexpr int kObservedSlots = 4;  ///< slots per thread
inline constexpr int kL2Line = 128;       ///< bytes of an L2 cache line

/// The observation of one layer: the arguments of its attention, and the data that the attention
/// stored.
struct ObservePlan {
  EvictingAttentionArgs args;
  PairTable table;
  PairRows rows;
  std::int64_t row_slots;  ///< slots of PairRows::logits
  int group;
  bool cache_positions;           ///< whether ages are maintained
  int chunks;                     ///< thread blocks per pair
  EvictionCandidate* candidates;  // [pair, chunk, tier]: the token of each block's slots that is
                                  // first in the eviction order
  std::int32_t* observed;         // [pair], zero between launches
  TierChoice choice;
};

/// The layers of one launch. This is a kernel's parameter.
struct ObservePlans {
  ObservePlan layers[kMaxObservedLayers];
};

}  // namespace kvlab::kernels
