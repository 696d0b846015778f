// The policies of the registry as compiled for eviction on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>
#include <vector>

#include "kernels/eviction.hpp"

namespace kvlab::kernels {

/// One policy's kernels. All keep the promises of kernels/types.hpp.
struct EvictionKernels {
  std::string_view name;
  std::size_t slot_bytes;    ///< of PolicyState::states; 0: none
  std::size_t params_bytes;  ///< of PolicyState::params, one sequence; 0: none
  /// Writes params_bytes: one value for each parameter, as in the catalogue.
  void (*params)(std::span<const double> values, std::byte* to);
  /// Of EvictingAttentionArgs::workspace, bytes.
  std::size_t (*attention_workspace)(const SlotCache& cache);
  cudaError_t (*attention)(const EvictingAttentionArgs& args, cudaStream_t stream);
};

/// EvictionKernels::params of a policy.
template <class P>
void write_params(std::span<const double> values, std::byte* to) {
  if constexpr (!std::is_empty_v<typename P::Params>)
    *reinterpret_cast<typename P::Params*>(to) = params_from<P>(values.data());
}

/// Every registered policy, in the registry's order: the fast kernels, two launches that overlap.
/// Squeezed positions need SlotCache::ages, and all of a head rotated.
const std::vector<EvictionKernels>& observing_eviction();

/// Every registered policy, in the registry's order: three plain launches, on any device. Logits
/// and probabilities of all live slots go through the workspace; a pair's bits depend on nothing
/// but the pair.
const std::vector<EvictionKernels>& plain_eviction();

}  // namespace kvlab::kernels
