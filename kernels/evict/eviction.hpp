// Eviction on the device: one layer's cache as slots, and what a policy does to it.
//
// A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head. Every pair has its
// own budget, hence its own number of slots, its own live tokens and its own victim. What changes
// from step to step is in device memory, so that a captured graph goes on serving.
#pragma once

#include "kernels/types.hpp"
#include "policies/policy.hpp"

namespace kvlab::kernels {

struct CodedCache;  // kernels/codes/coded_cache.hpp

/// One layer's cache. In decoding nothing is moved: the victim's slot takes the next token.
struct SlotCache : kvlab_cache {
  const CodedCache* coded = nullptr;  ///< host memory: keys and values lie on rungs; or null
};

/// Fills cache.ages from positions and lengths: where the cache was filled by other means than
/// decoding. Compares every two tokens of a pair.
cudaError_t number_by_age(const SlotCache& cache, cudaStream_t stream);

using PairRule = kvlab_rule;
inline constexpr std::uint32_t kUnlimited = 0xffff'ffffu;  ///< kvlab_rule::budget

/// What a policy works on, beside the cache.
struct PolicyState {
  std::byte* states;                  // [slot, slot_bytes]
  const kvlab_rule* rules;            // [pair]
  const std::byte* params;            // [sequence]: P::Params; null where that is empty
  const std::uint32_t* threshold16;   // [sequence]: of requests
  const std::uint64_t* seeds;         // [sequence]
  const std::uint32_t* sequence_ids;  // [sequence]: what Step::sequence says
  std::uint32_t layer;
  std::uint32_t first_head = 0;  ///< Step::kv_head of the first pair: a device may have some alone
  Observation* seen;  ///< [slot]: what each live token received, for verification; or null
  /// [pair]: room is made only when so many tokens are live; kUnlimited: never. Null: at the
  /// budget.
  const std::uint32_t* room_at = nullptr;
  const float* columns = nullptr;  ///< [slot, column of the policy]: what each token brought
};

/// One decoded token a sequence, which is at next_slots already (key, value and position; not its
/// state, which this admits). Attends over the live slots, shows the policy what each received,
/// updates its states, and leaves in next_slots where the token after it goes; lengths is updated.
struct EvictingAttentionArgs {
  SlotCache cache;
  PolicyState policy;
  Positions numbering;  ///< original: keys are rotated; cache: rotated here, by age
  /// Squeezed in two frames: keys and q are rotated at their positions all the same, and no key is
  /// rotated. For a policy that is `oldest_first`: the live tokens are the sinks and a run of the
  /// newest. The run is as far from the query by number as by position; for the sinks the query
  /// is rotated back by as many places as tokens have left. Token i < sinks must be in slot i.
  bool two_frames = false;
  const std::uint32_t* now;  // [sequence]: position of the token; kIdle: the sequence sits out
  const void* q;             // [sequence, query_head, dim] of type; rotated or plain, as keys are
  const float* inv_freq;     // [rotated / 2], where squeezed
  int rotated;
  float rope_factor;  ///< on cos and sin, where squeezed; 1 but for YaRN
  void* out;          // [sequence, query_head, dim] of type
  float* lse;         // [sequence, query_head], natural logarithm, or null
  void* workspace;    // its first kSignalBytes are zero before the first use, and left so
  /// No kernel that this one may overlap writes what it reads, but for q and each pair's newest
  /// token (key, value, position): so in a graph whose step decodes one token. Then the cache is
  /// fetched while the kernels before this one still run.
  bool settled = false;
  const float* sinks = nullptr;  // [query_head]: as AttentionShape has them
};
inline constexpr std::uint32_t kIdle = 0xffff'ffffu;

/// Of one launch that observes.
inline constexpr int kMostObservedLayers = 8;

}  // namespace kvlab::kernels
