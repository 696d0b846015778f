#include <vector>

#include "kernels/evict/policy_probe.hpp"
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

/// A thread for each token of a step (blockIdx.y): its place in the order of leaving.
__global__ void place_tokens(ProbeRun run) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= run.tokens) return;
  const std::uint64_t* ranks = run.ranks + std::size_t{blockIdx.y} * run.tokens;
  const std::uint32_t now = run.step[blockIdx.y].now;
  const LeavingKey own{run.guards.guard(i, now), ranks[i], i};
  std::uint32_t before = 0;
  for (std::uint32_t j = 0; j < run.tokens; ++j)
    if (LeavingKey{run.guards.guard(j, now), ranks[j], j} < own) ++before;
  run.leave_after[std::size_t{blockIdx.y} * run.tokens + i] = before;
}

}  // namespace

cudaError_t run_probe(const kernels::DevicePolicy& policy, const ProbeRun& run,
                      std::span<const double> values, cudaStream_t stream) {
  if (run.tokens == 0 || run.steps == 0) return cudaErrorInvalidValue;
  std::vector<double> to(policy.params_bytes / sizeof(double) +
                         1);  // an empty Params has a byte, too
  policy.params(values, reinterpret_cast<std::byte*>(to.data()));
  ProbeRun first = run;
  void* parameters[] = {&first, to.data()};
  const unsigned blocks = (run.tokens + kProbeThreads - 1) / kProbeThreads;
  if (const cudaError_t error = cudaLaunchKernel(policy.run_states, dim3(blocks),
                                                 dim3(kProbeThreads), parameters, 0, stream);
      error != cudaSuccess)
    return error;
  place_tokens<<<dim3(blocks, run.steps), kProbeThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

cudaError_t launch_observations(const ObservationRun& run, cudaStream_t stream) {
  if (run.count == 0) return cudaErrorInvalidValue;
  constexpr unsigned kThreads = 256;
  observe_all<<<(run.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

}  // namespace kvlab
