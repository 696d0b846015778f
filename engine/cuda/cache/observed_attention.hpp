// A step's attentions, layer by layer on one stream, and on a branch of it what shows the policy
// what was attended: nothing waits for that before the step's end.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/host/memory.hpp"

namespace kvlab {

/// What the steps of a cache share, one at a time.
struct ObserverBranch {
  /// Layers alternate between two halves of the workspaces. Before one is used again the stream
  /// waits for what was observed there a whole half ago: seldom, since each wait takes about a
  /// microsecond.
  static constexpr int kHalf = 4;
  static int workspaces(std::size_t layers) {
    return static_cast<int>(std::min<std::size_t>(layers, 2 * kHalf));
  }

  cuda::Stream stream;
  cuda::Event attended;
  std::array<cuda::Event, 2> observed;  ///< of each half
};

class ObservedAttention {
 public:
  /// `layers`: of a step, in order, with workspaces that are used again as ObserverBranch says.
  /// `kernels` and `branch` must outlive it.
  ObservedAttention(const kernels::EvictionKernels& kernels,
                    std::vector<kernels::EvictingAttentionArgs> layers,
                    const ObserverBranch& branch, cudaStream_t stream);

  void attend(std::size_t layer) const;
  /// Behind the first launch after that attention, which most needs to come soon: may branch off
  /// here what is to be observed.
  void observe(std::size_t layer) const;
  /// Ends the step: the stream goes on when all layers have been observed.
  void join() const;

 private:
  void branch_off(std::size_t first, std::size_t end) const;

  const kernels::EvictionKernels& kernels_;
  std::vector<kernels::EvictingAttentionArgs> layers_;
  const ObserverBranch& branch_;
  cudaStream_t stream_;
  std::size_t together_;   ///< layers that are observed at once
  bool beside_attention_;  ///< of the next layer
};

}  // namespace kvlab
