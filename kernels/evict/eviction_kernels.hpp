// The policies of the registry as compiled for eviction on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>
#include <vector>

#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

/// One policy's kernels. All keep the promises of kernels/types.hpp.
struct EvictionKernels {
  std::string_view name;
  Needs needs;
  bool oldest_first;         ///< may be squeezed in two frames
  std::size_t slot_bytes;    ///< of PolicyState::states; 0: none
  std::size_t params_bytes;  ///< of PolicyState::params, one sequence; 0: none
  /// Writes params_bytes: one value for each parameter, as in the catalogue.
  void (*params)(std::span<const double> values, std::byte* to);
  /// The policy's own kernel: a function's address, or a cudaKernel_t of code that was loaded.
  const void* kernel;
  /// Of EvictingAttentionArgs::workspace, bytes.
  std::size_t (*attention_workspace)(const SlotCache& cache);
  /// Attends, and leaves in the workspace what `observe` needs.
  cudaError_t (*attend)(const EvictionKernels& policy, const EvictingAttentionArgs& args,
                        cudaStream_t stream);
  /// Launches `kernel` behind the attention of some layers, each with a workspace of its own;
  /// kMostObservedLayers at most, which differ in nothing but their arrays. The next attention of
  /// such a layer, or with its workspace, must come behind it; nothing else need wait. `next`: the
  /// attention is the launch before it in `stream`.
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
  const PolicyState& state = args.policy;
  return (policy.oldest_first || !args.two_frames) && state.rules && state.seeds &&
         state.sequence_ids && (policy.slot_bytes == 0 || state.states) &&
         (policy.params_bytes == 0 || state.params) &&
         (policy.needs != Needs::requests || state.threshold16);
}

/// What launches `policy.kernel`: observe_pairs<P> (observing_attention.cuh), or evict_kernel<P>
/// (plain_eviction.cuh). Fills in attention_workspace, attend and observe; all else is given.
EvictionKernels observing_kernels(EvictionKernels policy);
EvictionKernels plain_kernels(EvictionKernels policy);

/// Every registered policy, in the registry's order: the fast kernels, an attention and a launch
/// behind it. Squeezed positions need SlotCache::ages, and all of a head rotated.
const std::vector<EvictionKernels>& observing_eviction();

/// Every registered policy, in the registry's order: three plain launches, on any device. Logits
/// and probabilities of all live slots go through the workspace; a pair's bits depend on nothing
/// but the pair.
const std::vector<EvictionKernels>& plain_eviction();

}  // namespace kvlab::kernels
