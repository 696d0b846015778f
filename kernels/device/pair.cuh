// A pair on the device: one KV head of one sequence, its slots, and the data that is passed to a
// policy.
#pragma once

#include <type_traits>

#include "kernels/evict/eviction.hpp"
#include "kernels/paged_row.cuh"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

struct Pair {
  int index, sequence, kv_head;
};

__device__ inline Pair pair_of(int index, int kv_heads) {
  return {index, index / kv_heads, index % kv_heads};
}

/// Number of slots with live tokens when the newest token, which is in slot next_slots, attends.
__device__ inline int live_slots(const kvlab_cache_view& cache, const Pair& pair) {
  return max(cache.lengths[pair.index], cache.next_slots[pair.index] + 1);
}

/// The element of `keys` at which a slot's key begins. The slot's value begins at the same element
/// of `values`.
__device__ inline std::int64_t row_of(const kvlab_cache_view& cache, int pair, std::int64_t slot) {
  if (cache.pages.blocks != nullptr)
    return paged_row(cache.pages, pair, cache.kv_heads, static_cast<int>(slot));
  return (cache.first_slot[pair] + slot) * cache.head_size;
}

/// The observation of a slot's token: the attention statistics that the policy sees.
__device__ inline Observation& observation_at(kvlab_observation* seen, std::int64_t slot) {
  static_assert(sizeof(kvlab_observation) == sizeof(Observation));
  return reinterpret_cast<Observation*>(seen)[slot];
}

/// Number of live tokens at which eviction begins; kUnlimited: never.
__device__ inline std::uint32_t evict_at(const kvlab_policy_state& policy, int pair) {
  return policy.evict_at != nullptr ? policy.evict_at[pair] : policy.rules[pair].budget;
}

__device__ inline ProtectedTokens protected_tokens_of(const kvlab_rule& rule) {
  return {.sinks = rule.sinks, .recent = rule.recent};
}

__device__ inline Step step_of(const kvlab_policy_state& policy, const Pair& pair,
                               std::uint32_t now, std::uint32_t live, std::uint32_t queries) {
  return {.now = now,
          .budget = policy.rules[pair.index].budget,
          .live = live,
          .queries = queries,
          .seed = policy.seeds[pair.sequence],
          .sequence = policy.sequence_ids[pair.sequence],
          .layer = policy.layer,
          .kv_head = policy.first_head + static_cast<std::uint32_t>(pair.kv_head)};
}

template <class P>
__device__ typename P::Params params_of(const kvlab_policy_state& policy, const Pair& pair) {
  if constexpr (std::is_empty_v<typename P::Params>)
    return {};
  else
    return reinterpret_cast<const typename P::Params*>(policy.params)[pair.sequence];
}

/// The token of a slot, with its features.
template <class P>
__device__ Token token_of(const kvlab_policy_state& policy, std::int64_t slot,
                          std::uint32_t position) {
  constexpr int features = static_cast<int>(P::kInfo.feature_count());
  Token token{position};
#pragma unroll
  for (int c = 0; c < features; ++c) token.feature[c] = policy.features[slot * features + c];
  return token;
}

}  // namespace kvlab::kernels
