// The replay on a CUDA device.
#pragma once

#include <functional>
#include <memory>

#include "sim/exact_pass.hpp"
#include "sim/head_replayer.hpp"

namespace kvlab {

/// Called with a head task's index, the index of a configuration of the plan, a query, and the live
/// positions (ascending) to which the query attended.
using KeptWatcher = std::function<void(std::size_t task, std::size_t config, std::uint32_t query,
                                       std::span<const std::uint32_t> live)>;

/// Replays on the current CUDA device. It supports the registered policies, original and cache
/// positions, and groups of at most 8 query heads. The head size must be a multiple of 8 and at
/// most 256, and the number of rotated dimensions a multiple of 4.
class CudaReplayer : public HeadReplayer {
 public:
  /// Computes one exact attention pass over the trace with cuBLASLt. For each block of queries: Q
  /// K^T, causal softmax, P V. The time is measured on the device and excludes reading the trace.
  virtual ExactPass exact_pass(const TraceReader& trace, unsigned threads) = 0;
  /// Number of waves of thread blocks per query in the last run, if each policy runs alone on the
  /// device; summed over the policies.
  virtual int waves() const = 0;
};

/// Throws std::invalid_argument in a build without CUDA, and std::runtime_error without a device.
/// With a `watcher`, the replay is slow.
std::unique_ptr<CudaReplayer> cuda_replayer(KeptWatcher watcher = nullptr);

}  // namespace kvlab
