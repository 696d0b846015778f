#include <vector>

#include "policies/observation.hpp"
#include "tests/policies/policy_probe.hpp"

namespace kvlab {
namespace {

__global__ void observe_all(ObservationArgs args) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.count) return;
  args.masses[i] = fixed_mass(args.weights[i], args.probabilities[i]);
  const std::uint64_t unweighted = fixed_mass(1.0f, args.probabilities[i]);
  args.requests[i] = is_requested(unweighted, args.row_max, args.threshold16) ? 1 : 0;
}

/// Computes each token's index in the eviction order of each step. One thread for each token;
/// blockIdx.y is the step.
__global__ void place_tokens(ProbeArgs args) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.tokens) return;
  const std::uint64_t* ranks = args.ranks + std::size_t{blockIdx.y} * args.tokens;
  const std::uint32_t now = args.step[blockIdx.y].now;
  const EvictionKey own{args.protected_tokens.protection(i, now), ranks[i], i};
  std::uint32_t before = 0;
  for (std::uint32_t j = 0; j < args.tokens; ++j)
    if (EvictionKey{args.protected_tokens.protection(j, now), ranks[j], j} < own) ++before;
  args.eviction_order[std::size_t{blockIdx.y} * args.tokens + i] = before;
}

}  // namespace

cudaError_t run_probe(const kernels::DevicePolicy& policy, const ProbeArgs& args,
                      std::span<const double> values, cudaStream_t stream) {
  if (args.tokens == 0 || args.steps == 0) return cudaErrorInvalidValue;
  std::vector<double> to(policy.params_bytes / sizeof(double) +
                         1);  // an empty Params has one byte, too
  policy.params(values, reinterpret_cast<std::byte*>(to.data()));
  ProbeArgs first = args;
  void* parameters[] = {&first, to.data()};
  const unsigned blocks = (args.tokens + kProbeThreads - 1) / kProbeThreads;
  if (const cudaError_t error = cudaLaunchKernel(policy.run_states, dim3(blocks),
                                                 dim3(kProbeThreads), parameters, 0, stream);
      error != cudaSuccess)
    return error;
  place_tokens<<<dim3(blocks, args.steps), kProbeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_observations(const ObservationArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaErrorInvalidValue;
  constexpr unsigned kThreads = 256;
  observe_all<<<(args.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab
