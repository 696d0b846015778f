// A step's attentions, layer by layer on one stream, and on a branch of it what shows the policy
// what was attended: nobody waits for that before the step's end.
#pragma once

#include <array>
#include <vector>

#include "kernels/host/memory.hpp"
#include "kernels/evict/eviction_kernels.hpp"

namespace kvlab {

class ObservedAttention {
 public:
  /// `cache`: the shape of every layer, with the most sequences. `kernels` must outlive it.
  ObservedAttention(const kernels::EvictionKernels& kernels, const kernels::SlotCache& cache,
                    int layers, cudaStream_t stream);
  /// Device memory that it takes.
  static std::size_t bytes(const kernels::EvictionKernels& kernels, const kernels::SlotCache& cache,
                           int layers);

  /// The layers of a step in their order. Gives each a workspace.
  void attend(kernels::EvictingAttentionArgs args);
  /// Behind the first launch after that attention, which most needs to come soon: may branch off
  /// here what is to be observed.
  void observe();
  /// Ends the step: the stream goes on when all layers have been observed.
  void join();

 private:
  /// Layers take workspaces by turns. Before one half of them is used again the stream waits for
  /// what was observed there a whole half ago: seldom, since each wait takes about a microsecond.
  static constexpr int kHalf = 4;

  void branch_off();

  const kernels::EvictionKernels& kernels_;
  cudaStream_t stream_;
  std::size_t workspace_bytes_;
  cuda::DeviceBuffer workspaces_;  // [2 * kHalf], or one for each layer
  cuda::Stream branch_;
  cuda::Event attended_;
  std::array<cuda::Event, 2> observed_;                  ///< of each half
  std::vector<kernels::EvictingAttentionArgs> waiting_;  ///< attended, not yet observed
};

}  // namespace kvlab
