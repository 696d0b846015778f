// An append of many tokens under a policy: a prompt, a chunk of a prompt, or a later turn.
//
// For each layer of a sequence, first write the keys and values of the new tokens to the slots
// after those of the older tokens. Then call:
// - prefill_attention(…, rows), which attends and stores the softmax of each row (attention.hpp);
// - observe_queries(), only if the policy needs attention statistics of the keys;
// - compact(), which appends the tokens to the policy and evicts to the budget.
//
// A long append may go through the first two steps in parts.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Bytes of workspace. The workspace does not grow with queries x keys, because no attention matrix
/// is stored. (With cache positions, `q` and `keys` must already be rotated to cache positions and
/// rounded to the type.)
std::size_t observe_workspace(const kvlab_prefill_args& args);
/// Adds integers, so the result is equal bit for bit for any split of the append into parts. Work:
/// 2 * head_size operations for each (query, query head, visible key), which is half the work of
/// the attention. A policy that needs both masses and requests takes twice as many operations.
/// Refuses a policy with Needs::nothing.
cudaError_t observe_queries(const kvlab_observe_args& args, cudaStream_t stream);

std::size_t compact_workspace(const kvlab_cache_view& from);
/// Ends an append: does steps 2 and 4 of the rule (docs/start/concepts.md), and step 1 of the next
/// append. For every pair, it appends the new tokens to the policy's states and passes the
/// attention that each live token has received to the policy. Then it keeps the last budget - 1
/// tokens in the eviction order, or all tokens if fewer than evict_at are live. Kept tokens go to
/// `to` in the order of their slots. If `to` is `from`, the kept tokens end up in the pair's first
/// slots: a kept token in a later slot moves to one of the first slots whose token is evicted, and
/// all other kept tokens stay where they are. `rows`: whether keys and values are moved too.
cudaError_t compact(const DevicePolicy& policy, const kvlab_compact_args& args, cudaStream_t stream,
                    bool rows = true);

/// The first half of compact(): computes the ranks of tokens, and evicts nothing. ranks_of()
/// returns the ranks that order the tokens, by slot: [pair, args.from.max_slots].
cudaError_t rank_tokens(const DevicePolicy& policy, const kvlab_compact_args& args,
                        cudaStream_t stream);
const std::uint64_t* ranks_of(const kvlab_compact_args& args);

/// The first of two halves of a compaction with by_layer, for the case that each of several devices
/// has the same number of a layer's KV heads. It writes ranks by age, [pair, max_slots of from].
cudaError_t rank_by_age(const DevicePolicy& policy, const kvlab_compact_args& args,
                        std::uint64_t* by_age, cudaStream_t stream);
/// The second half chooses the tokens to keep. `by_age`: the ranks of all devices in the order of
/// their heads, [device, pair, max_slots]. The workspace must be as the first half left it.
cudaError_t keep_by_ranks(const DevicePolicy& policy, const kvlab_compact_args& args,
                          const std::uint64_t* by_age, int devices, cudaStream_t stream);

/// See kvlab_copy_prefix(). Launches one thread for each token of a pair.
cudaError_t copy_prefix(const DevicePolicy& policy, const kvlab_prefix_args& args,
                        cudaStream_t stream);

}  // namespace kvlab::kernels
