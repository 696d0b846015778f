// The policies' own text run on the device, bare: no attention, no cache. It shows that a policy
// compiles for the device and does there what it does on the host, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/rule.hpp"

namespace kvlab {

/// A fixed set of tokens through some steps. All pointers are device memory.
struct ProbeRun {
  std::uint32_t tokens;        ///< token i is at position i, slot i; all are admitted in step 0
  std::uint32_t steps;         ///< each observes, then ranks
  const Step* step;            ///< [step]
  const Observation* seen;     ///< [step, token]
  Guards guards;               ///< in tokens
  std::uint64_t* ranks;        ///< out, [step, token]
  std::uint32_t* leave_after;  ///< out, [step, token]: how many tokens leave before this one
  std::byte* slots;            ///< out, [token, slot_bytes]: the states after the last step
  float* weights;              ///< out, [token]: weight of the query of that age; 1 if unweighted
};

/// One policy of the registry, as compiled for the device.
struct DeviceProbe {
  std::string_view name;
  std::size_t slot_bytes;  ///< 0: the policy keeps no state
  /// Enqueues the run on `stream`; may be captured in a graph. `params` as in the catalogue.
  cudaError_t (*launch)(const ProbeRun& run, std::span<const double> params, cudaStream_t stream);
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
