// Attention that also observes: the part that depends on the policy. pair_attention stores its
// logits and, for each query head, the largest logit and its probability. After it, one launch for
// one or more layers computes each token's attention statistics and passes them to the policy. Keys
// and values are not read again. Only the next step of the same layer has to wait for this launch,
// so the launch may run at the same time as the rest of the step.
//
// Memory traffic per slot, in addition to keys and values: the state is read and written, the
// position is read and, if keys are rotated to cache positions, the age is read and written. For
// 8-byte states this is 20 bytes, 3.9% of keys and values at head size 128. The logits, 4 bytes per
// query head, are written and read in the L2 cache.
#pragma once

#include "kernels/decode/pair_row.cuh"
#include "kernels/device/eviction_order.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/mass_sum.hpp"
#include "kernels/device/pair.cuh"
#include "kernels/device/signal.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/evict/observing_attention.hpp"
#include "policies/observation.hpp"
#include "policies/policy_checks.hpp"

namespace kvlab::kernels {

template <Policy P>
inline constexpr bool kHasState = !std::is_empty_v<typename P::Slot>;
template <Policy P>
inline constexpr bool kObserves = P::kInfo.needs != Needs::nothing;

/// One slot of a pair, in one thread's registers.
template <Policy P>
struct OwnSlot {
  int slot;
  bool live = false, newest = false;
  std::uint32_t position, age;
  std::uint32_t row_index = 0;  ///< row of the token, if there are tiers
  typename P::Slot state;
};

/// The part of a pair that a thread block handles, and data of the pair that all its threads need.
template <Policy P>
struct PairBlock {
  const EvictingAttentionArgs& args;
  const ObservePlan& plan;
  Pair pair;
  int live, newest;
  std::int64_t first;
  std::uint32_t now;
  kvlab_rule rule;
  std::uint32_t full;  ///< number of live tokens at which a token is evicted; kUnlimited: never
  typename P::Params params;
  Step attended;

  /// Starts all loads at once, so that they overlap.
  __device__ PairBlock(const ObservePlan& observe, int index)
      : args(observe.args), plan(observe), pair(pair_of(index, args.cache.kv_heads)) {
    now = args.now[pair.sequence];
    newest = args.cache.next_slots[index];
    first = args.cache.first_slot[index];
    rule = args.policy.rules[index];
    full = evict_at(args.policy, index);
    params = params_of<P>(args.policy, pair);
    live = min(live_slots(args.cache, pair), args.cache.max_slots);
    attended = step_of(args.policy, pair, now, static_cast<std::uint32_t>(live), 1);
    if (now == kIdle) live = 0;
  }

  __device__ bool is_full() const {
    return P::kInfo.evicts && full != kUnlimited && static_cast<std::uint32_t>(live) >= full;
  }
  __device__ typename P::Slot* state(int slot) const {
    return reinterpret_cast<typename P::Slot*>(args.policy.states) + first + slot;
  }
  __device__ std::uint32_t* age(int slot) const { return args.cache.ages + first + slot; }
  __device__ Token token(const OwnSlot<P>& own) const {
    return token_of<P>(args.policy, first + own.slot, own.position);
  }

  /// Starts the loads of a slot's data.
  __device__ OwnSlot<P> load(int slot) const {
    OwnSlot<P> own{.slot = slot};
    own.live = slot < live;
    own.newest = slot == newest;
    if (own.live) own.position = args.cache.positions[first + slot];
    if (own.live && plan.choice.in_use()) own.row_index = plan.choice.row_of_slot[first + slot];
    if (!own.live || own.newest) return own;
    if (plan.cache_positions) own.age = *age(slot);
    if constexpr (kHasState<P>) own.state = *state(slot);
    return own;
  }
  /// Initializes the newest token's state.
  __device__ void append(OwnSlot<P>& own) const {
    if (own.live && own.newest) P::append(own.state, token(own), params, attended);
  }

  /// Updates ages: the age of a token is the number of older live tokens. The newest token gets
  /// live - 1, and the ages of tokens younger than the evicted one decrease by one.
  __device__ void renumber(const OwnSlot<P>& own, std::uint32_t gone) const {
    *age(own.slot) =
        own.newest ? static_cast<std::uint32_t>(live - 1) : own.age - (own.age > gone ? 1 : 0);
  }

  __device__ EvictionKey eviction_key(const OwnSlot<P>& own) const {
    Step ranking = attended;
    ranking.now = now + 1;
    ranking.queries = 0;
    return protected_tokens_of(rule).key(rank_key(P::rank(own.state, token(own), params, ranking)),
                                         own.position, ranking.now);
  }

  /// Whether a token is evicted or demoted.
  __device__ bool chooses() const {
    return is_full() || (full != kUnlimited && plan.choice.is_full(pair.index));
  }
  __device__ int tiers() const { return plan.choice.tiers(pair.index); }

  /// Writes the number of live tokens and the slot of the next token.
  __device__ void finish(int victim) const {
    args.cache.lengths[pair.index] = live;
    args.cache.next_slots[pair.index] = is_full() ? victim : live;
  }
};

/// Data that the threads of a block share.
struct ObserveShared {
  float2 softmax[kMaxGroup];
  float floors[kMaxGroup];  ///< the lowest probability that counts as a request, for each head
  EvictionCandidate warp_victims[kMaxDeviceTiers][kObserveThreads / kWarpSize];
  EvictionCandidate firsts[kMaxDeviceTiers];  ///< [tier]: the first token of the eviction order
                                              ///< among the block's slots
  bool is_last;
};

/// Called by the whole thread block; ends with a barrier.
template <Policy P>
__device__ void load_softmax(const PairBlock<P>& block, ObserveShared& shared) {
  const int head = static_cast<int>(threadIdx.x);
  if (head < block.plan.group) {
    const float2 row = __ldcg(&block.plan.rows.softmax[block.pair.index * kMaxGroup + head]);
    shared.softmax[head] = row;
    if constexpr (needs_requests(P::kInfo.needs))
      shared.floors[head] = request_floor(fixed_mass(1.0f, row.y),
                                          block.args.policy.threshold16[block.pair.sequence]);
  }
  __syncthreads();
}

/// The group's logits of a slot, kWidth heads at a time.
template <int kWidth>
struct alignas(kWidth * sizeof(float)) Logits {
  float logits[kWidth];
};
template <int kWidth>
__device__ Logits<kWidth> load_logits(const float* from) {
  if constexpr (kWidth == 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
    return {four.x, four.y, four.z, four.w};
  } else if constexpr (kWidth == 2) {
    const float2 two = __ldcg(reinterpret_cast<const float2*>(from));
    return {two.x, two.y};
  } else {
    return {__ldcg(from)};
  }
}

/// The observation of a slot, summed so far.
template <Policy P>
struct Received {
  MassSum sum;
  std::uint64_t weighted = 0;
  bool requested = false;

  __device__ void add(float p, float floor, const PairBlock<P>& block) {
    if constexpr (needs_requests(P::kInfo.needs)) requested |= p >= floor;
    if constexpr (!needs_mass(P::kInfo.needs)) return;
    if (block.rule.group_max != 0)
      sum.raise(p);
    else if constexpr (P::kInfo.weighted)
      weighted += fixed_mass(weight(block), p);
    else
      sum.add(p);
  }
  __device__ static float weight(const PairBlock<P>& block) {
    if constexpr (P::kInfo.weighted)
      return P::tail(block.params) > 0 ? P::weight(0, block.params) : 0.0f;
    else
      return 1;
  }
  __device__ Observation observation(const PairBlock<P>& block) const {
    Observation seen{.queries = 1};
    if constexpr (needs_requests(P::kInfo.needs)) {
      seen.requests = requested ? 1 : 0;
      seen.last_request = requested ? block.now : 0;
    }
    if constexpr (needs_mass(P::kInfo.needs)) {
      if (block.rule.group_max != 0)
        seen.mass = fixed_mass(weight(block), sum.largest());
      else
        seen.mass =
            P::kInfo.weighted ? weighted : sum.total(static_cast<std::uint32_t>(block.plan.group));
    }
    return seen;
  }
};

/// Adds up the attention that a thread's slots received from all query heads of the group. The
/// loads of all slots overlap.
template <int kWidth, Policy P, int kSlots>
__device__ void receive(const PairBlock<P>& block, const OwnSlot<P> (&own)[kSlots],
                        const ObserveShared& shared, Received<P> (&received)[kSlots]) {
  const ObservePlan& plan = block.plan;
  const int stride = logits_stride(plan.group);
  const float* const logits = plan.rows.logits + block.pair.index * plan.row_slots * stride;
#pragma unroll 1
  for (int head = 0; head < plan.group; head += kWidth) {
    Logits<kWidth> some[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      for (float& logit : some[i].logits) logit = -INFINITY;  // adds nothing to the sums
      if (own[i].live) some[i] = load_logits<kWidth>(logits + own[i].slot * stride + head);
    }
#pragma unroll
    for (int h = 0; h < kWidth; ++h) {
      if (head + h >= plan.group) break;
      const float2 softmax = shared.softmax[head + h];
      const float floor = shared.floors[head + h];
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
        received[i].add(exp2_fast(some[i].logits[h] - softmax.x) * softmax.y, floor, block);
    }
  }
}

/// Discards a warp's logits from the L2 cache, because they are not read again. Otherwise the cache
/// would write them to memory.
template <Policy P>
__device__ void discard_logits(const PairBlock<P>& block, int slot) {
  constexpr int kLine = kL2Line / sizeof(float);
  const int stride = logits_stride(block.plan.group);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const float* const line = block.plan.rows.logits +
                            (block.pair.index * block.plan.row_slots + slot - lane) * stride +
                            lane * kLine;
  if (slot - lane < block.live && lane < stride)
    asm volatile("discard.global.L2 [%0], %1;" ::"l"(line), "n"(kL2Line) : "memory");
}

/// Calls the policy's observe() for the live tokens of this thread's slots, and stores their new
/// states.
template <Policy P, int kSlots>
__device__ void observe_slots(const PairBlock<P>& block, OwnSlot<P> (&own)[kSlots],
                              ObserveShared& shared) {
  const kvlab_policy_state& policy = block.args.policy;
  if constexpr (kObserves<P>) {
    load_softmax(block, shared);
    Received<P> received[kSlots];
    const int stride = logits_stride(block.plan.group);
    if (stride % 4 == 0)
      receive<4>(block, own, shared, received);
    else if (stride % 2 == 0)
      receive<2>(block, own, shared, received);
    else
      receive<1>(block, own, shared, received);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      OwnSlot<P>& mine = own[i];
      if (!mine.live) continue;
      const Observation seen = received[i].observation(block);
      if (policy.seen != nullptr) observation_at(policy.seen, block.first + mine.slot) = seen;
      P::observe(mine.state, seen, block.params, block.attended);
    }
    __syncwarp();
#pragma unroll
    for (const OwnSlot<P>& mine : own) discard_logits(block, mine.slot);
  }
  const std::uint32_t gone =
      block.plan.cache_positions ? __ldcg(&block.plan.rows.gone[block.pair.index]) : 0;
#pragma unroll
  for (const OwnSlot<P>& mine : own) {
    if (!mine.live) continue;
    if constexpr (kHasState<P>) *block.state(mine.slot) = mine.state;
    if (block.plan.cache_positions) block.renumber(mine, gone);
  }
}

/// For each tier, finds the first token of the eviction order among the block's slots, and writes
/// it to `to` [tier]. First each warp finds the token among its slots. Then one warp for each tier
/// finds the first of these tokens.
template <Policy P, int kSlots>
__device__ void find_firsts(const PairBlock<P>& block, const OwnSlot<P> (&own)[kSlots],
                            ObserveShared& shared, EvictionCandidate* to) {
  constexpr int kWarps = kObserveThreads / kWarpSize;
  static_assert(kMaxDeviceTiers <= kWarps);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize, tiers = block.tiers();
  const bool chooses = block.chooses();  // the same for all threads
  for (int r = 0; chooses && r < tiers; ++r) {
    const TierRows rows = block.plan.choice.rows(block.pair.index, r);
    EvictionCandidate first = EvictionCandidate::none();
#pragma unroll
    for (const OwnSlot<P>& mine : own)
      if (mine.live && rows.hold(mine.row_index))
        first = first_victim(first, {block.eviction_key(mine), mine.slot});
    first = warp_first_victim(first);
    if (lane == 0) shared.warp_victims[r][warp] = first;
  }
  __syncthreads();
  if (warp >= tiers) return;
  const EvictionCandidate first = warp_first_victim(
      chooses && lane < kWarps ? shared.warp_victims[warp][lane] : EvictionCandidate::none());
  if (lane == 0) to[warp] = first;
}

/// blockIdx.x is the part of a pair, blockIdx.y the pair, and blockIdx.z the layer. The block of a
/// pair that finishes last chooses the slot of the pair's next token.
template <Policy P>
__global__ void __launch_bounds__(kObserveThreads, kObserves<P> ? 4 : 6)
    observe_pairs(const __grid_constant__ ObservePlans plans) {
  __shared__ ObserveShared shared;
  wait_for_predecessor();
  const ObservePlan& plan = plans.layers[blockIdx.z];
  const int chunk = static_cast<int>(blockIdx.x), pair = static_cast<int>(blockIdx.y);
  const PairBlock<P> block(plan, pair);
  if (block.live == 0) return;
  OwnSlot<P> own[kObservedSlots];
#pragma unroll
  for (int i = 0; i < kObservedSlots; ++i)
    own[i] =
        block.load((chunk * kObservedSlots + i) * kObserveThreads + static_cast<int>(threadIdx.x));
#pragma unroll
  for (OwnSlot<P>& mine : own) block.append(mine);
  observe_slots(block, own, shared);
  const int tiers = block.tiers();
  EvictionCandidate* firsts = shared.firsts;  // [chunk, tier]
  if (plan.chunks > 1) firsts = plan.candidates + pair * plan.chunks * plan.choice.max_tiers;
  find_firsts(block, own, shared, firsts + chunk * tiers);
  if (tiers > 1) __syncthreads();  // several warps have written firsts
  if (plan.chunks > 1) {
    if (threadIdx.x == 0) shared.is_last = arrive(&plan.observed[pair]) == plan.chunks - 1;
    __syncthreads();
    if (!shared.is_last) return;
  }
  if (threadIdx.x >= kWarpSize) return;
  EvictionCandidate victim = EvictionCandidate::none();
  for (int r = 0; r < tiers; ++r) {
    EvictionCandidate first = EvictionCandidate::none();
    for (int i = static_cast<int>(threadIdx.x); i < plan.chunks; i += kWarpSize)
      first = first_victim(first, firsts[i * tiers + r]);
    first = warp_first_victim(first);
    if (threadIdx.x == 0 && plan.choice.in_use())
      plan.choice.firsts[pair * kMaxDeviceTiers + r] = first;
    victim = first_victim(victim, first);
  }
  if (threadIdx.x == 0) {
    block.finish(victim.slot);
    plan.observed[pair] = 0;
  }
}

}  // namespace kvlab::kernels
