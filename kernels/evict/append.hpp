// An append of many tokens under a policy: a prompt, a chunk of one, a later turn.
//
// For each layer of a sequence: write the tokens' keys and values behind the older ones, then
//   prefill_attention(…, rows)    attends and keeps each row's softmax (attention.hpp)
//   observe_queries               what the queries give to each key; only if the policy needs it
//   compact                        appends, shows the policy, and keeps the budget's tokens
// A long append may go through the first two in parts.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Nothing of the size queries x keys is in memory. (Cache positions: q and keys rotated to cache
/// positions and rounded to the type, like any others.)
std::size_t observe_workspace(const kvlab_prefill_args& args);
/// Sums are of integers: equal bits, whatever the parts. Work: 2 * head_size operations for each
/// (query, query head, visible key), half of attention's; twice that
/// for both. Refused: Needs::nothing.
cudaError_t observe_queries(const kvlab_observe_args& args, cudaStream_t stream);

std::size_t compact_workspace(const kvlab_cache& from);
/// The end of an append: steps 2 and 4 of the rule and step 1 of the next one. For every pair:
/// appends the new tokens to the policy, shows it what each live token has received, then keeps the
/// last budget - 1 in the eviction order; all where fewer than evict_at are live. Those that stay
/// go to `to` in the order of their slots, or, where `to` is `from`, those beyond the kept number
/// fill the holes, and nothing else moves. `rows`: keys and values are moved, too.
cudaError_t compact(const DevicePolicy& policy, const kvlab_shrink_args& args, cudaStream_t stream,
                    bool rows = true);

/// Its first half: nothing is evicted. ranks_of(): what tokens are then ordered by, [pair,
/// max_slots of from], by slot.
cudaError_t rank_tokens(const DevicePolicy& policy, const kvlab_shrink_args& args,
                        cudaStream_t stream);
const std::uint64_t* ranks_of(const kvlab_shrink_args& args);

/// The halves of a compaction by_layer where several devices have a layer's KV heads, equally many.
/// First: ranks by age, [pair, max_slots of from].
cudaError_t rank_by_age(const DevicePolicy& policy, const kvlab_shrink_args& args,
                        std::uint64_t* by_age, cudaStream_t stream);
/// Then, from those of all devices in the order of their heads, [device, pair, max_slots]: who
/// stays. The workspace is as the first half has left it.
cudaError_t keep_by_ranks(const DevicePolicy& policy, const kvlab_shrink_args& args,
                          const std::uint64_t* by_age, int devices, cudaStream_t stream);

/// A thread for each token of a pair.
cudaError_t copy_prefix(const DevicePolicy& policy, const kvlab_prefix_args& args,
                        cudaStream_t stream);

}  // namespace kvlab::kernels
