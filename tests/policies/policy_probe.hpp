// Runs the policies' source on the device, without attention or cache. It shows that a policy
// compiles for the device and computes the same bits there as on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/probe_args.hpp"

namespace kvlab {

/// Enqueues the probe on `stream`; can be captured in a graph. `values`: the policy's parameters,
/// in the order of the catalogue.
cudaError_t run_probe(const kernels::DevicePolicy& policy, const ProbeArgs& args,
                      std::span<const double> values, cudaStream_t stream);

/// Arguments of the conversion of probabilities to masses and requests on the device. All pointers
/// are to device memory, [count].
struct ObservationArgs {
  std::uint32_t count;
  const float* weights;
  const float* probabilities;
  std::uint64_t row_max;  ///< unweighted mass of the row's largest entry
  std::uint32_t threshold16;
  std::uint64_t* masses;   ///< out: fixed_mass(weight, probability)
  std::uint8_t* requests;  ///< out: whether the unweighted entry is requested
};
cudaError_t launch_observations(const ObservationArgs& args, cudaStream_t stream);

}  // namespace kvlab
