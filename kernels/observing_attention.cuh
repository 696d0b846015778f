// Attention that observes: the part that knows the policy. Behind pair_attention runs one more
// launch, which starts while that one still runs, fetches states and positions, and waits pair by
// pair until the logits are there: neither keys nor values are read again. Two of its blocks fit
// beside two CTAs of the attention on a multiprocessor, where keys are not turned by age.
//
// Bytes beside keys and values, for each slot: the state read and written, the position read, and
// where keys are turned by age the age read and written: 20 for 8-byte states, 3.9% of keys and
// values at head size 128. The logits, 4 bytes for each query head, are written and read in the L2
// cache.
#pragma once

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/leaving.cuh"
#include "kernels/device/mass_sum.hpp"
#include "kernels/device/pair.cuh"
#include "kernels/device/signal.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/observing_attention.hpp"
#include "kernels/pair_row.cuh"
#include "policies/observation.hpp"

namespace kvlab::kernels {

template <Policy P>
inline constexpr bool kHasState = !std::is_empty_v<typename P::Slot>;
template <Policy P>
inline constexpr bool kObserves = P::kInfo.needs != Needs::nothing;

/// One slot of a pair in one thread's registers.
template <Policy P>
struct OwnSlot {
  int slot;
  bool live = false, newest = false;
  std::uint32_t position, age;
  typename P::Slot state;
};

/// A block's share of a pair, and what all its threads need to know of the pair.
template <Policy P>
struct PairBlock {
  const EvictingAttentionArgs& args;
  const ObservePlan& plan;
  Pair pair;
  int live, newest;
  std::int64_t first;
  std::uint32_t now;
  typename P::Params params;

  __device__ PairBlock(const ObservePlan& observe, int index)
      : args(observe.args), plan(observe), pair(pair_of(index, args.cache.kv_heads)) {
    live = live_slots(plan.table, index);
    newest = args.cache.next_slots[index];
    first = args.cache.first_slot[index];
    now = args.now[pair.sequence];
    params = params_of<P>(args.policy, pair);
  }

  __device__ Step attended() const {
    return step_of(args.policy, pair, now, static_cast<std::uint32_t>(live), 1);
  }
  __device__ bool is_full() const {
    const std::uint32_t budget = args.policy.rules[pair.index].budget;
    return P::kInfo.evicts && budget != kUnlimited && static_cast<std::uint32_t>(live) >= budget;
  }
  __device__ typename P::Slot* state(int slot) const {
    return reinterpret_cast<typename P::Slot*>(args.policy.states) + first + slot;
  }
  __device__ std::uint32_t* age(int slot) const { return args.cache.ages + first + slot; }

  /// What the attention before does not write. The newest token's state is made here.
  __device__ OwnSlot<P> load(int slot) const {
    OwnSlot<P> own{.slot = slot};
    own.live = slot < live;
    own.newest = slot == newest;
    if (!own.live) return own;
    own.position = own.newest ? now : args.cache.positions[first + slot];
    if (plan.by_age && !own.newest) own.age = *age(slot);
    if constexpr (kHasState<P>)
      if (!own.newest) own.state = *state(slot);
    if (own.newest) P::admit(own.state, Token{own.position}, params, attended());
    return own;
  }

  /// The newest token's place by age is the last; who was younger than the victim moves up.
  __device__ void renumber(const OwnSlot<P>& own, std::uint32_t gone) const {
    *age(own.slot) =
        own.newest ? static_cast<std::uint32_t>(live - 1) : own.age - (own.age > gone ? 1 : 0);
  }

  __device__ LeavingKey leaving_key(const OwnSlot<P>& own) const {
    const Step leaves = step_of(args.policy, pair, now + 1, static_cast<std::uint32_t>(live), 0);
    const Guards guards = guards_of(args.policy.rules[pair.index]);
    return {guards.guard(own.position, leaves.now),
            P::rank(own.state, Token{own.position}, params, leaves), own.position};
  }

  /// Where the next token goes.
  __device__ void finish(int victim) const {
    args.cache.lengths[pair.index] = live;
    args.cache.next_slots[pair.index] = is_full() ? victim : live;
  }
};

/// What one slot received, from the logits of the group's query heads.
template <Policy P>
__device__ Observation observation_at(const PairBlock<P>& block, int slot, const float2* softmax,
                                      const float* floors) {
  const ObservePlan& plan = block.plan;
  const int stride = logits_stride(plan.group);
  const float* const logits =
      plan.rows.logits + (block.pair.index * plan.row_slots + slot) * std::int64_t{stride};
  Observation seen{.queries = 1};
  MassSum sum;
  const auto see = [&](float logit, int head) {
    const float p = exp2_fast(logit - softmax[head].x) * softmax[head].y;
    if constexpr (P::kInfo.needs == Needs::requests) {
      if (p >= floors[head]) seen.requests = 1;
    } else if constexpr (P::kInfo.weighted) {
      const float weight = P::tail(block.params) > 0 ? P::weight(0, block.params) : 0.0f;
      seen.mass += fixed_mass(weight, p);
    } else {
      sum.add(p);
    }
  };
  if (stride == 1) {
    see(__ldcg(logits), 0);
  } else if (stride == 8) {  // the second half of a sector comes from the L1 cache
    for (int head = 0; head < plan.group; head += 4) {
      const float4 four = *reinterpret_cast<const float4*>(logits + head);
      see(four.x, head);
      see(four.y, head + 1);
      see(four.z, head + 2);
      if (head + 3 < plan.group) see(four.w, head + 3);
    }
  } else {
    for (int head = 0; head < plan.group; head += 2) {
      const float2 two = __ldcg(reinterpret_cast<const float2*>(logits + head));
      see(two.x, head);
      if (head + 1 < plan.group) see(two.y, head + 1);
    }
  }
  if constexpr (P::kInfo.needs == Needs::mass && !P::kInfo.weighted)
    seen.mass = sum.total(static_cast<std::uint32_t>(plan.group));
  if (seen.requests > 0) seen.last_request = block.now;
  return seen;
}

/// What the block's threads share.
struct ObserveShared {
  float2 softmax[kMostGroup];
  float floors[kMostGroup];  ///< the least probability that is a request
  Leaving leaving[kObserveThreads / kWarpSize];
  bool is_last;
};

/// By the whole block, once the pair's flag is up.
template <Policy P>
__device__ void load_softmax(const PairBlock<P>& block, ObserveShared& shared) {
  const int head = static_cast<int>(threadIdx.x);
  if (head < block.plan.group) {
    const float2 row = __ldcg(&block.plan.rows.softmax[block.pair.index * kMostGroup + head]);
    shared.softmax[head] = row;
    if constexpr (P::kInfo.needs == Needs::requests)
      shared.floors[head] = request_floor(fixed_mass(1.0f, row.y),
                                          block.args.policy.threshold16[block.pair.sequence]);
  }
  __syncthreads();
}

/// Shows the policy what its slots received, and notes it.
template <Policy P, int kSlots>
__device__ void observe_slots(const PairBlock<P>& block, OwnSlot<P> (&own)[kSlots],
                              ObserveShared& shared) {
  const PolicyState& policy = block.args.policy;
  if constexpr (kObserves<P>) {
    load_softmax(block, shared);
#pragma unroll
    for (OwnSlot<P>& mine : own) {
      if (!mine.live) continue;
      const Observation seen = observation_at(block, mine.slot, shared.softmax, shared.floors);
      if (policy.seen != nullptr) policy.seen[block.first + mine.slot] = seen;
      P::observe(mine.state, seen, block.params, block.attended());
    }
  }
  for (const OwnSlot<P>& mine : own) {
    if (!mine.live) continue;
    if constexpr (kHasState<P>) *block.state(mine.slot) = mine.state;
    if (block.plan.by_age) block.renumber(mine, __ldcg(&block.plan.rows.gone[block.pair.index]));
  }
}

/// Which of its slots leaves first, in thread 0.
template <Policy P, int kSlots>
__device__ Leaving first_of_slots(const PairBlock<P>& block, const OwnSlot<P> (&own)[kSlots],
                                  Leaving* shared) {
  Leaving first = Leaving::none();
  if (!block.is_full()) return first;  // the same for all threads
  for (const OwnSlot<P>& mine : own)
    if (mine.live) first = first_to_leave(first, {block.leaving_key(mine), mine.slot});
  return block_first_to_leave(first, shared);
}

/// Blocks pair by pair, plan.chunks for each. The last of a pair's to be through says where its
/// next token goes. (Six of a multiprocessor: 40 registers a thread, so that two fit beside the
/// attention. The first then wait for their pairs, and need not start when those are ready.)
template <Policy P>
__global__ void __launch_bounds__(kObserveThreads, 6)
    observe_pairs(const __grid_constant__ ObservePlan plan) {
  constexpr int kSlots = slots_per_thread(kObserves<P>);
  __shared__ ObserveShared shared;
  const EvictingAttentionArgs& args = plan.args;
  if (!args.settled) wait_for_predecessor();
  let_successor_start();
  const int chunk = static_cast<int>(blockIdx.x) % plan.chunks;
  const PairBlock<P> block(plan, static_cast<int>(blockIdx.x) / plan.chunks);
  const int pair = block.pair.index;
  if (block.live == 0) {
    wait_for_predecessor();
    return;
  }
  OwnSlot<P> own[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    own[i] = block.load((chunk * kSlots + i) * kObserveThreads + static_cast<int>(threadIdx.x));
  if (kObserves<P> || plan.by_age) {
    if (threadIdx.x == 0) wait_for_flag(&plan.rows.ready[pair]);
    __syncthreads();
    observe_slots(block, own, shared);
  } else if constexpr (kHasState<P>) {
    observe_slots(block, own, shared);
  }
  const Leaving first = first_of_slots(block, own, shared.leaving);
  if (threadIdx.x == 0) {
    plan.leaving[blockIdx.x] = first;
    shared.is_last = arrive(&plan.observed[pair]) == plan.chunks - 1;
  }
  __syncthreads();
  if (shared.is_last && threadIdx.x < kWarpSize) {
    Leaving victim = Leaving::none();
    for (int i = static_cast<int>(threadIdx.x); i < plan.chunks; i += kWarpSize)
      victim = first_to_leave(victim, plan.leaving[blockIdx.x - chunk + i]);
    victim = warp_first_to_leave(victim);
    if (threadIdx.x == 0) {
      wait_for_flag(&plan.rows.ready[pair]);
      block.finish(victim.slot);
      plan.rows.ready[pair] = 0;
      plan.observed[pair] = 0;
    }
  }
  wait_for_predecessor();
}

}  // namespace kvlab::kernels
