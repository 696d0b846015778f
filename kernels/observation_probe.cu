#include "kernels/policy_probe.hpp"
#include "policies/observation.hpp"

namespace kvlab {
namespace {

__global__ void observe_all(ObservationRun run) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= run.count) return;
  run.masses[i] = fixed_mass(run.weights[i], run.probabilities[i]);
  const std::uint64_t unweighted = fixed_mass(1.0f, run.probabilities[i]);
  run.requests[i] = requested(unweighted, run.row_max, run.threshold16) ? 1 : 0;
}

}  // namespace

cudaError_t launch_observations(const ObservationRun& run, cudaStream_t stream) {
  if (run.count == 0) return cudaErrorInvalidValue;
  constexpr unsigned kThreads = 256;
  observe_all<<<(run.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

}  // namespace kvlab
