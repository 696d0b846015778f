// Attention that observes: the part that is the same for every policy. Not for callers of the
// library.
#pragma once

#include "kernels/eviction.hpp"
#include "kernels/pair_attention.hpp"

namespace kvlab::kernels {

struct Leaving;

inline constexpr int kObserveThreads = 256;
/// Slots of a thread. Two where it waits for logits: twice as many blocks run then while the
/// attention does.
constexpr int slots_per_thread(bool observes) { return observes ? 2 : 4; }

/// What the launch behind the attention needs.
struct ObservePlan {
  EvictingAttentionArgs args;
  PairTable table;
  PairRows rows;
  std::int64_t row_slots;  ///< of PairRows::logits
  int group;
  bool by_age;             ///< ages are kept
  int chunks;              ///< blocks of a pair
  Leaving* leaving;        // [pair, chunk]: who leaves first of each block's slots
  std::int32_t* observed;  // [pair], zero between launches
};

/// Launches the attention, with logits left for the launch behind it if `observes`, and says what
/// that one needs.
cudaError_t attend_for(const EvictingAttentionArgs& args, bool observes, ObservePlan& plan,
                       cudaStream_t stream);
std::size_t observing_workspace(const SlotCache& cache);

}  // namespace kvlab::kernels
