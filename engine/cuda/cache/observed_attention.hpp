// A step's attention, layer by layer on one stream. Observation runs on a parallel branch, and only
// the end of the step waits for it.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/host/memory.hpp"

namespace kvlab {

/// State that the steps of a cache share. Only one step uses it at a time.
struct ObserverBranch {
  /// The workspaces have two halves of kHalf workspaces. kHalf layers use the first half, the next
  /// kHalf layers the second half, and so on. Before a half is reused, the stream waits until the
  /// layers that used it last have been observed. So it waits only once for kHalf layers; a wait
  /// takes about 1 µs.
  static constexpr int kHalf = 4;
  static int workspaces(std::size_t layers) {
    return static_cast<int>(std::min<std::size_t>(layers, 2 * kHalf));
  }

  cuda::Stream stream;
  cuda::Event attended;
  std::array<cuda::Event, 2> observed;  ///< [half]
};

class ObservedAttention {
 public:
  /// `layers`: a step's layers in order, with workspaces that are reused as described in
  /// ObserverBranch. `kernels` and `branch` must outlive this object.
  ObservedAttention(const kernels::EvictionKernels& kernels,
                    std::vector<kernels::EvictingAttentionArgs> layers,
                    const ObserverBranch& branch, cudaStream_t stream);

  void attend(std::size_t layer) const;
  /// Call it after the first launch that follows the layer's attention, because that launch is the
  /// most urgent one. It may start the observation branch.
  void observe(std::size_t layer) const;
  /// Ends the step: the stream waits until all layers were observed.
  void join() const;

 private:
  void branch_off(std::size_t first, std::size_t end) const;

  const kernels::EvictionKernels& kernels_;
  std::vector<kernels::EvictingAttentionArgs> layers_;
  const ObserverBranch& branch_;
  cudaStream_t stream_;
  std::size_t together_;   ///< number of layers that are observed together
  bool beside_attention_;  ///< whether observation runs at the same time as the next layer's
                           ///< attention
};

}  // namespace kvlab
