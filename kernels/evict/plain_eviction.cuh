// The part of plain eviction that depends on the policy: it computes the observation of each live
// token, the policy's states, and the next victim. Uses one thread block for each pair. Memory
// traffic: 24 bytes per slot, in addition to the probabilities.
#pragma once

#include "kernels/device/eviction_order.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/evict/eviction.hpp"
#include "kernels/evict/tier_choice.cuh"
#include "policies/observation.hpp"

namespace kvlab::kernels {

inline constexpr int kEvictThreads = 256;

/// The arrays that the attention stores in the workspace, and the choice of the tokens to demote.
struct PlainRows {
  float* p;        // [sequence, query_head, max_slots]: logits, then probabilities
  float* largest;  // [sequence, query_head]: the largest probability
  TierChoice choice;
};

/// The observation of one slot: the attention that the group's query heads gave it.
template <class P>
__device__ Observation observation_of(const EvictingAttentionArgs& args, const PlainRows& rows,
                                      const Pair& pair, int slot,
                                      const typename P::Params& params) {
  const kvlab_cache_view& cache = args.cache;
  const int group = cache.query_heads / cache.kv_heads;
  Observation seen{.queries = 1};
  for (int head = 0; head < group; ++head) {
    const std::int64_t row = std::int64_t{pair.index} * group + head;
    const float p = rows.p[row * cache.max_slots + slot];
    if constexpr (needs_mass(P::kInfo.needs)) {
      float weight = 1;
      if constexpr (P::kInfo.weighted) weight = P::tail(params) > 0 ? P::weight(0, params) : 0.0f;
      const std::uint64_t mass = fixed_mass(weight, p);
      const bool by_largest = args.policy.rules[pair.index].group_max != 0;
      seen.mass = by_largest ? max(seen.mass, mass) : seen.mass + mass;
    }
    if constexpr (needs_requests(P::kInfo.needs))
      if (is_requested(fixed_mass(1.0f, p), fixed_mass(1.0f, rows.largest[row]),
                       args.policy.threshold16[pair.sequence])) {
        seen.requests = 1;
        seen.last_request = args.now[pair.sequence];
      }
  }
  return seen;
}

template <class P>
__global__ void evict_kernel(const EvictingAttentionArgs args, PlainRows rows) {
  __shared__ EvictionCandidate candidates[kEvictThreads / kWarpSize];
  const kvlab_cache_view& cache = args.cache;
  const kvlab_policy_state& policy = args.policy;
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  const std::uint32_t now = args.now[pair.sequence];
  if (now == kIdle) return;
  const int live = live_slots(cache, pair), newest = cache.next_slots[pair.index];
  const std::int64_t first_slot = cache.first_slot[pair.index];
  const kvlab_rule rule = policy.rules[pair.index];
  const ProtectedTokens protected_tokens = protected_tokens_of(rule);
  const auto params = params_of<P>(policy, pair);
  const Step attended = step_of(policy, pair, now, static_cast<std::uint32_t>(live), 1);
  const Step ranking = step_of(policy, pair, now + 1, static_cast<std::uint32_t>(live), 0);

  const int tiers = rows.choice.tiers(pair.index);
  EvictionCandidate mine[kMaxDeviceTiers];
  for (EvictionCandidate& one : mine) one = EvictionCandidate::none();
  for (int slot = static_cast<int>(threadIdx.x); slot < live; slot += kEvictThreads) {
    const Token token = token_of<P>(policy, first_slot + slot, cache.positions[first_slot + slot]);
    typename P::Slot none;
    typename P::Slot* state = &none;
    if constexpr (!std::is_empty_v<typename P::Slot>)
      state = reinterpret_cast<typename P::Slot*>(policy.states) + first_slot + slot;
    if (slot == newest) P::append(*state, token, params, attended);
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const Observation seen = observation_of<P>(args, rows, pair, slot, params);
      if (policy.seen) observation_at(policy.seen, first_slot + slot) = seen;
      P::observe(*state, seen, params, attended);
    }
    const EvictionKey key = protected_tokens.key(rank_key(P::rank(*state, token, params, ranking)),
                                                 token.position, now + 1);
    EvictionCandidate& first = mine[rows.choice.tier(pair.index, first_slot + slot)];
    first = first_victim(first, {key, slot});
  }
  EvictionCandidate victim = EvictionCandidate::none();
  for (int r = 0; r < tiers; ++r) {
    const EvictionCandidate first = block_first_victim(mine[r], candidates);
    __syncthreads();
    if (rows.choice.in_use() && threadIdx.x == 0)
      rows.choice.firsts[pair.index * kMaxDeviceTiers + r] = first;
    victim = first_victim(victim, first);
  }
  if (threadIdx.x != 0) return;
  const std::uint32_t limit = evict_at(policy, pair.index);
  const bool full = limit != kUnlimited && static_cast<std::uint32_t>(live) >= limit;
  cache.lengths[pair.index] = live;
  cache.next_slots[pair.index] = P::kInfo.evicts && full ? victim.slot : live;
}

}  // namespace kvlab::kernels
