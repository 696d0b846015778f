// Two ways to launch a policy's eviction: fast, and plainly.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// One policy and one way to launch it. All keep the promises of kernels/types.hpp.
struct EvictionKernels : DevicePolicy {
  /// Bytes of workspace, of a cache whose tokens lie on tiers or do not.
  std::size_t (*attention_workspace)(const kvlab_cache& cache, bool quantized_cache);
  /// Attends, and leaves in the workspace what `observe` needs.
  cudaError_t (*attend)(const EvictionKernels& policy, const EvictingAttentionArgs& args,
                        cudaStream_t stream);
  /// Launches the policy's own kernel behind the attention of some layers, each with a workspace of
  /// its own; kMaxObservedLayers at most, which differ in nothing but their arrays. The next
  /// attention of such a layer, or with its workspace, must come behind it; nothing else need wait.
  /// `next`: the attention is the launch before it in `stream`.
  cudaError_t (*observe)(const EvictionKernels& policy,
                         std::span<const EvictingAttentionArgs> layers, bool next,
                         cudaStream_t stream);

  /// Both.
  cudaError_t attention(const EvictingAttentionArgs& args, cudaStream_t stream) const {
    const cudaError_t error = attend(*this, args, stream);
    return error != cudaSuccess ? error : observe(*this, {&args, 1}, true, stream);
  }
};

/// Whether a policy has all that it works on, and can have what is asked.
inline bool complete(const EvictionKernels& policy, const EvictingAttentionArgs& args) {
  const kvlab_policy_state& state = args.policy;
  return (policy.oldest_first || args.numbering != KVLAB_TWO_FRAMES) && state.rules &&
         state.seeds && state.sequence_ids && (policy.slot_bytes == 0 || state.states) &&
         (policy.params_bytes == 0 || state.params) &&
         (policy.features.empty() || state.features) &&
         (!needs_requests(policy.needs) || state.threshold16);
}

/// The fast kernels, an attention and a launch behind it. Cache positions need
/// kvlab_cache::ages, and all of a head rotated.
EvictionKernels observing_kernels(const DevicePolicy& policy);

/// Three plain launches, on any device. Logits and probabilities of all live slots go through the
/// workspace; a pair's bits depend on nothing but the pair.
EvictionKernels plain_kernels(const DevicePolicy& policy);

}  // namespace kvlab::kernels
