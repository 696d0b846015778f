// An admission of many tokens under a policy: a prompt, a chunk of one, a later turn.
//
// For each layer of a sequence: write the tokens' keys and values behind the older ones, then
//   prefill_attention(…, rows)    attends and keeps each row's softmax (attention.hpp)
//   observe_queries               what the queries give to each key; only if the policy needs it
//   shrink                        admits, shows the policy, and keeps the budget's tokens
// A long admission may go through the first two in parts.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// Nothing of the size queries x keys is in memory. (Squeezed positions: q and keys rotated by age
/// and rounded to the type, like any others.)
std::size_t observe_workspace(const kvlab_prefill_args& args);
/// Sums are of integers: equal bits, whatever the parts. Work: 2 * head_size operations for each
/// (query, query head, visible key), half of attention's; twice that
/// for both. Refused: Needs::nothing.
cudaError_t observe_queries(const kvlab_observe_args& args, cudaStream_t stream);

/// The end of an admission: steps 2 and 4 of the rule and step 1 of the next one. For every pair:
/// admits the new tokens to the policy, shows it what each live token has received, then keeps the
/// last budget - 1 in the order of leaving; all where fewer than PolicyState::room_at are live.
///
/// Tokens lie in `from`: lengths[pair] older ones, and behind them admitted[sequence] new ones in
/// order, of which keys and values are written and the rest is not. Those that stay go to `to`, in
/// the order of their slots; `to` is disjoint from `from`, or the same memory with the same slots:
/// then those beyond the kept number fill the holes, and nothing else moves. lengths, next_slots
/// and positions of `to` are written, so that decoding goes on there.
///
/// Nothing admitted and `seen` null: makes room in `from` (or copies) without showing anything.
struct ShrinkArgs {
  SlotCache from, to;             ///< the same pairs; shapes are equal
  PolicyState policy;             ///< states: of from
  std::byte* to_states;           // [slot of to, slot_bytes]
  float* to_columns = nullptr;    // [slot of to, column]; those of from are there, new ones too
  const std::uint32_t* now;       // [sequence]: position of the first new token; kIdle: sits out
  const std::uint32_t* admitted;  // [sequence]: new tokens
  Observation* seen;  // [slot of from], from observe_queries; queries is filled in here.
                      // Null where the policy needs nothing
  void* workspace;    // shrink_workspace() bytes, not shared by calls at one time
  /// What becomes of ranks before tokens are ordered. by_layer: the KV heads of a sequence hold the
  /// same tokens, and a token's rank is the sum over them, as numbers in their order. Then each
  /// rank becomes the mean or maximum of those at most `smooth` places away by age.
  bool by_layer = false;
  std::uint32_t smooth = 0;
  Modifiers::Pool pool = Modifiers::Pool::mean;
  bool rows = true;  ///< keys and values are moved, too
};
std::size_t shrink_workspace(const SlotCache& from);

cudaError_t shrink(const DevicePolicy& policy, const ShrinkArgs& args, cudaStream_t stream);

/// Its first half: nobody leaves. ranks_of(): what tokens are then ordered by, [pair, most_slots of
/// from], by slot.
cudaError_t rank_tokens(const DevicePolicy& policy, const ShrinkArgs& args, cudaStream_t stream);
const std::uint64_t* ranks_of(const ShrinkArgs& args);

/// The halves of a shrink by_layer where several devices have a layer's KV heads, equally many.
/// First: ranks by age, [pair, most_slots of from].
cudaError_t rank_by_age(const DevicePolicy& policy, const ShrinkArgs& args, std::uint64_t* by_age,
                        cudaStream_t stream);
/// Then, from those of all devices in the order of their heads, [device, pair, most_slots]: who
/// stays. The workspace is as the first half has left it.
cudaError_t keep_by_ranks(const DevicePolicy& policy, const ShrinkArgs& args,
                          const std::uint64_t* by_age, int devices, cudaStream_t stream);

/// A thread for each token of a pair.
cudaError_t copy_prefix(const DevicePolicy& policy, const kvlab_prefix_args& args,
                        cudaStream_t stream);

}  // namespace kvlab::kernels
