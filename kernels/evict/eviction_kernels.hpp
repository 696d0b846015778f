// Two ways to launch a policy's eviction: fast kernels and plain kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// One policy and one way to launch its kernels. All functions follow the rules in
/// kernels/types.hpp.
struct EvictionKernels : DevicePolicy {
  /// Bytes of workspace for a cache. `quantized_cache`: whether its tokens are on tiers.
  std::size_t (*attention_workspace)(const kvlab_cache_view& cache, bool quantized_cache);
  /// Attends, and stores in the workspace the data that `observe` needs.
  cudaError_t (*attend)(const EvictionKernels& policy, const EvictingAttentionArgs& args,
                        cudaStream_t stream);
  /// Launches the policy's kernel after the attention of up to kMaxObservedLayers layers. Each
  /// layer has a separate workspace, and the layers may differ only in their arrays. The next
  /// attention over one of these layers, or with one of these workspaces, must wait for this
  /// launch; other work need not. `next`: whether the attention is the launch directly before this
  /// one in `stream`.
  cudaError_t (*observe)(const EvictionKernels& policy,
                         std::span<const EvictingAttentionArgs> layers, bool next,
                         cudaStream_t stream);

  /// Calls attend(), then observe().
  cudaError_t attention(const EvictingAttentionArgs& args, cudaStream_t stream) const {
    const cudaError_t error = attend(*this, args, stream);
    return error != cudaSuccess ? error : observe(*this, {&args, 1}, true, stream);
  }
};

/// Whether the arguments have all arrays that the policy needs, and the policy supports what they
/// request.
inline bool complete(const EvictionKernels& policy, const EvictingAttentionArgs& args) {
  const kvlab_policy_state& state = args.policy;
  return (policy.oldest_first || args.numbering != KVLAB_CACHE_POSITIONS_ROTATED) && state.rules &&
         state.seeds && state.sequence_ids && (policy.slot_bytes == 0 || state.states) &&
         (policy.params_bytes == 0 || state.params) &&
         (policy.features.empty() || state.features) &&
         (!needs_requests(policy.needs) || state.threshold16);
}

/// The fast kernels: an attention, and a launch after it that observes. Cache positions require
/// kvlab_cache_view::ages, and heads of which RoPE rotates all dimensions.
EvictionKernels observing_kernels(const DevicePolicy& policy);

/// Three simple launches that run on any device. Logits and probabilities of all live slots are
/// stored in the workspace. The results of a pair depend only on that pair, bit for bit.
EvictionKernels plain_kernels(const DevicePolicy& policy);

}  // namespace kvlab::kernels
