// An append of many tokens under a policy: a prompt, a chunk of a prompt, or a later turn.
//
// For each layer of a sequence, write the tokens' keys and values after the older ones. Then call:
// - prefill_attention(…, rows), which attends and stores the softmax of each row (attention.hpp);
// - observe_queries(), only if the policy needs attention statistics of the keys;
// - compact(), which appends the tokens to the policy and keeps the budget's tokens.
//
// A long append may go through the first two steps in parts.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Bytes of workspace. Nothing of size queries x keys is stored. (With cache positions, the q and
/// keys that are passed have been rotated to cache positions and rounded to the type.)
std::size_t observe_workspace(const kvlab_prefill_args& args);
/// Sums are of integers, so bits are equal for any split into parts. Work: 2 * head_size operations
/// for each (query, query head, visible key), half of attention's; twice that for masses and
/// requests together. Refuses a policy with Needs::nothing.
cudaError_t observe_queries(const kvlab_observe_args& args, cudaStream_t stream);

std::size_t compact_workspace(const kvlab_cache_view& from);
/// The end of an append: steps 2 and 4 of the rule, and step 1 of the next append. For every pair:
/// appends the new tokens to the policy, shows it what each live token has received, then keeps the
/// last budget - 1 tokens in the eviction order, or all if fewer than evict_at are live. Kept
/// tokens go to `to` in the order of their slots. If `to` is `from`, kept tokens beyond the kept
/// number fill the holes, and nothing else moves. `rows`: also moves keys and values.
cudaError_t compact(const DevicePolicy& policy, const kvlab_compact_args& args, cudaStream_t stream,
                    bool rows = true);

/// The first half of compact(): ranks tokens and evicts nothing. ranks_of() returns the ranks that
/// order the tokens, [pair, max_slots of from], by slot.
cudaError_t rank_tokens(const DevicePolicy& policy, const kvlab_compact_args& args,
                        cudaStream_t stream);
const std::uint64_t* ranks_of(const kvlab_compact_args& args);

/// The halves of a compaction by_layer if several devices hold a layer's KV heads, equally many
/// each. First half: ranks by age, [pair, max_slots of from].
cudaError_t rank_by_age(const DevicePolicy& policy, const kvlab_compact_args& args,
                        std::uint64_t* by_age, cudaStream_t stream);
/// Second half: from the ranks of all devices in the order of their heads, [device, pair,
/// max_slots], chooses the tokens that stay. The workspace must be as the first half has left it.
cudaError_t keep_by_ranks(const DevicePolicy& policy, const kvlab_compact_args& args,
                          const std::uint64_t* by_age, int devices, cudaStream_t stream);

/// A thread for each token of a pair.
cudaError_t copy_prefix(const DevicePolicy& policy, const kvlab_prefix_args& args,
                        cudaStream_t stream);

}  // namespace kvlab::kernels
