// The replay on a CUDA device.
#pragma once

#include <functional>
#include <memory>

#include "sim/exact_pass.hpp"
#include "sim/head_replayer.hpp"

namespace kvlab {

/// Called with the indices of a head task and a configuration of the plan, a query, and the live
/// positions that it attended, ascending.
using KeptWatcher = std::function<void(std::size_t task, std::size_t config, std::uint32_t query,
                                       std::span<const std::uint32_t> live)>;

/// Takes registered policies at any positions, for groups of at most 8 query heads of a size up to
/// 256 that is a multiple of 8 (of which a multiple of 4 rotates).
class CudaReplayer : public HeadReplayer {
 public:
  /// One exact pass of attention over the trace by cuBLASLt, by blocks of queries: products,
  /// causal softmax, products. Its time is without reading the trace, and on the device alone.
  virtual ExactPass exact_pass(const TraceReader& trace, unsigned threads) = 0;
  /// Rounds of thread blocks that every query of the last run took, each policy alone on the
  /// device.
  virtual int waves() const = 0;
};

/// Throws std::invalid_argument in a build without CUDA, std::runtime_error without a device. With
/// a watcher it is slow.
std::unique_ptr<CudaReplayer> cuda_replayer(KeptWatcher watcher = nullptr);

}  // namespace kvlab
