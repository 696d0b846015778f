// The part of a compaction that depends on the policy (see append.hpp). The other parts are in
// compact.cu.
#pragma once

#include "kernels/device/pair.cuh"
#include "kernels/evict/append.hpp"
#include "policies/bytes.hpp"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

inline constexpr int kCompactThreads = 256;

/// Data that a compaction passes between its kernels.
struct CompactWorkspace {
  std::uint64_t* ranks;   // [pair, max_slots]
  std::int32_t* sources;  // [pair, max_slots]: for each slot of `to`, the slot of `from` whose
                          // token moves there
  std::int32_t* holes;    // [pair, max_slots]: for a compaction in place that keeps n tokens: those
                          // of the pair's first n slots whose tokens are evicted. For tokens on
                          // tiers: the tier of each token
  std::uint64_t* by_age;  // [pair, max_slots]: ranks, if modifiers change them
};
inline __host__ __device__ CompactWorkspace compact_parts(const kvlab_compact_args& args) {
  const std::size_t slots = std::size_t(args.from.sequences) * args.from.kv_heads *
                            static_cast<std::size_t>(args.from.max_slots);
  auto* const ranks = static_cast<std::uint64_t*>(args.workspace);
  auto* const sources = reinterpret_cast<std::int32_t*>(ranks + 2 * slots);
  return {ranks, sources, sources + slots, ranks + slots};
}

/// One pair of a compaction. Construct it before a kernel writes `lengths`, because it reads the
/// number of older tokens from there.
struct CompactPair {
  int index, sequence, kv_head;
  std::uint32_t older, appended, now;
  std::int64_t first_slot;  ///< index of the first slot in `from`

  __device__ CompactPair(const kvlab_compact_args& args, int pair)
      : index(pair),
        sequence(pair / args.from.kv_heads),
        kv_head(pair % args.from.kv_heads),
        older(static_cast<std::uint32_t>(args.from.lengths[pair])),
        appended(args.appended[sequence]),
        now(args.now[sequence]),
        first_slot(args.from.first_slot[pair]) {}
  __device__ bool idle() const { return now == kIdle; }
  __device__ std::uint32_t live() const { return older + appended; }
};

/// Appends new tokens to the policy's states, observes, and computes ranks. Uses one thread for
/// each slot of a pair (blockIdx.y).
template <Policy P>
__global__ void __launch_bounds__(kCompactThreads)
    settle_tokens(const __grid_constant__ kvlab_compact_args args) {
  using Slot = typename P::Slot;
  const CompactPair pair(args, static_cast<int>(blockIdx.y));
  const std::uint32_t slot = blockIdx.x * kCompactThreads + threadIdx.x;
  if (pair.idle() || slot >= pair.live()) return;
  const kvlab_policy_state& policy = args.policy;
  const std::int64_t at = pair.first_slot + slot;
  typename P::Params params{};
  if constexpr (!std::is_empty_v<typename P::Params>)
    params = reinterpret_cast<const typename P::Params*>(policy.params)[pair.sequence];
  Step step{.now = pair.now,
            .budget = policy.rules[pair.index].budget,
            .live = pair.live(),
            .queries = pair.appended,
            .seed = policy.seeds[pair.sequence],
            .sequence = policy.sequence_ids[pair.sequence],
            .layer = policy.layer,
            .kv_head = policy.first_head + static_cast<std::uint32_t>(pair.kv_head)};
  const bool is_new = slot >= pair.older;
  if (is_new) args.from.positions[at] = pair.now + (slot - pair.older);
  const Token token = token_of<P>(policy, at, args.from.positions[at]);

  Slot state{};
  if constexpr (!std::is_empty_v<Slot>)
    if (!is_new) state = reinterpret_cast<const Slot*>(policy.states)[at];
  if (is_new) P::append(state, token, params, step);
  if constexpr (P::kInfo.needs != Needs::nothing)
    if (args.seen != nullptr) {
      Observation& seen = observation_at(args.seen, at);
      seen.queries = is_new ? pair.live() - slot : pair.appended;
      P::observe(state, seen, params, step);
    }
  if constexpr (!std::is_empty_v<Slot>) reinterpret_cast<Slot*>(policy.states)[at] = state;

  step.now = pair.now + pair.appended;
  step.queries = 0;
  compact_parts(args).ranks[std::size_t(pair.index) * args.from.max_slots + slot] =
      rank_key(P::rank(state, token, params, step));
}

}  // namespace kvlab::kernels
