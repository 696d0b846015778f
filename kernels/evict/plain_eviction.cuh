// The part of plain eviction that is a policy's own: what each live token received, the policy's
// states, and the next victim. A block for each pair; 24 bytes a slot beside the probabilities.
#pragma once

#include "kernels/device/leaving.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/evict/eviction.hpp"
#include "kernels/evict/rung_choice.cuh"
#include "policies/observation.hpp"

namespace kvlab::kernels {

inline constexpr int kEvictThreads = 256;

/// What the attention leaves in the workspace, and who steps down.
struct PlainRows {
  float* p;        // [sequence, query_head, most_slots]: logits, then probabilities
  float* largest;  // [sequence, query_head]: the largest probability
  RungChoice choice;
};

/// What one slot received from the group's query heads.
template <class P>
__device__ Observation observation_of(const EvictingAttentionArgs& args, const PlainRows& rows,
                                      const Pair& pair, int slot,
                                      const typename P::Params& params) {
  const kvlab_cache& cache = args.cache;
  const int group = cache.query_heads / cache.kv_heads;
  Observation seen{.queries = 1};
  for (int head = 0; head < group; ++head) {
    const std::int64_t row = std::int64_t{pair.index} * group + head;
    const float p = rows.p[row * cache.most_slots + slot];
    if constexpr (needs_mass(P::kInfo.needs)) {
      float weight = 1;
      if constexpr (P::kInfo.weighted) weight = P::tail(params) > 0 ? P::weight(0, params) : 0.0f;
      const std::uint64_t mass = fixed_mass(weight, p);
      const bool by_largest = args.policy.rules[pair.index].group_max != 0;
      seen.mass = by_largest ? max(seen.mass, mass) : seen.mass + mass;
    }
    if constexpr (needs_requests(P::kInfo.needs))
      if (requested(fixed_mass(1.0f, p), fixed_mass(1.0f, rows.largest[row]),
                    args.policy.threshold16[pair.sequence])) {
        seen.requests = 1;
        seen.last_request = args.now[pair.sequence];
      }
  }
  return seen;
}

template <class P>
__global__ void evict_kernel(const EvictingAttentionArgs args, PlainRows rows) {
  __shared__ Leaving leaving[kEvictThreads / kWarpSize];
  const kvlab_cache& cache = args.cache;
  const kvlab_policy_state& policy = args.policy;
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  const std::uint32_t now = args.now[pair.sequence];
  if (now == kIdle) return;
  const int live = live_slots(cache, pair), newest = cache.next_slots[pair.index];
  const std::int64_t first_slot = cache.first_slot[pair.index];
  const kvlab_rule rule = policy.rules[pair.index];
  const Guards guards = guards_of(rule);
  const auto params = params_of<P>(policy, pair);
  const Step attended = step_of(policy, pair, now, static_cast<std::uint32_t>(live), 1);
  const Step leaves = step_of(policy, pair, now + 1, static_cast<std::uint32_t>(live), 0);

  const int rungs = rows.choice.rungs(pair.index);
  Leaving mine[kMostRungs];
  for (Leaving& one : mine) one = Leaving::none();
  for (int slot = static_cast<int>(threadIdx.x); slot < live; slot += kEvictThreads) {
    const Token token = token_of<P>(policy, first_slot + slot, cache.positions[first_slot + slot]);
    typename P::Slot none;
    typename P::Slot* state = &none;
    if constexpr (!std::is_empty_v<typename P::Slot>)
      state = reinterpret_cast<typename P::Slot*>(policy.states) + first_slot + slot;
    if (slot == newest) P::admit(*state, token, params, attended);
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const Observation seen = observation_of<P>(args, rows, pair, slot, params);
      if (policy.seen) observation_at(policy.seen, first_slot + slot) = seen;
      P::observe(*state, seen, params, attended);
    }
    const LeavingKey key{guards.guard(token.position, now + 1),
                         rank_key(P::rank(*state, token, params, leaves)), token.position};
    Leaving& first = mine[rows.choice.rung(pair.index, first_slot + slot)];
    first = first_to_leave(first, {key, slot});
  }
  Leaving victim = Leaving::none();
  for (int r = 0; r < rungs; ++r) {
    const Leaving first = block_first_to_leave(mine[r], leaving);
    __syncthreads();
    if (rows.choice.in_use() && threadIdx.x == 0)
      rows.choice.firsts[pair.index * kMostRungs + r] = first;
    victim = first_to_leave(victim, first);
  }
  if (threadIdx.x != 0) return;
  const std::uint32_t most = room_at(policy, pair.index);
  const bool full = most != kUnlimited && static_cast<std::uint32_t>(live) >= most;
  cache.lengths[pair.index] = live;
  cache.next_slots[pair.index] = P::kInfo.evicts && full ? victim.slot : live;
}

}  // namespace kvlab::kernels
