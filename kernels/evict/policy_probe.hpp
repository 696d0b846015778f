// The policies' own text run on the device, bare: no attention, no cache. It shows that a policy
// compiles for the device and does there what it does on the host, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/evict/probe_run.hpp"

namespace kvlab {

/// One policy, as compiled for the device.
struct DeviceProbe {
  std::string_view name;
  std::size_t slot_bytes;    ///< 0: the policy keeps no state
  std::size_t params_bytes;  ///< 0: it takes no parameters
  /// Writes P::Params: one value for each parameter, as in the catalogue.
  void (*params)(std::span<const double> values, std::byte* to);
  /// run_states<P> (policy_probe.cuh): a function's address, or a cudaKernel_t of loaded code.
  const void* kernel;

  /// Enqueues the run on `stream`; may be captured in a graph. `values` as in the catalogue.
  cudaError_t launch(const ProbeRun& run, std::span<const double> values,
                     cudaStream_t stream) const;
};

/// Every registered policy, in the registry's order.
const std::vector<DeviceProbe>& device_probes();

/// Probabilities to integers on the device. All pointers are device memory, [count].
struct ObservationRun {
  std::uint32_t count;
  const float* weights;
  const float* probabilities;
  std::uint64_t row_max;  ///< unweighted mass of the row's largest entry
  std::uint32_t threshold16;
  std::uint64_t* masses;   ///< out: fixed_mass(weight, probability)
  std::uint8_t* requests;  ///< out: whether the unweighted entry is requested
};
cudaError_t launch_observations(const ObservationRun& run, cudaStream_t stream);

}  // namespace kvlab
