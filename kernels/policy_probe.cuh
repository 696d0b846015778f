// One policy compiled for the device: see policy_probe.hpp.
#pragma once

#include "kernels/policy_probe.hpp"

namespace kvlab {

inline constexpr unsigned kProbeThreads = 128;

/// A thread for each token: its state through all steps.
template <Policy P>
__global__ void run_states(ProbeRun run, typename P::Params params) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= run.tokens) return;
  const Token token{i};
  typename P::Slot slot;
  P::admit(slot, token, params, run.step[0]);
  for (std::uint32_t s = 0; s < run.steps; ++s) {
    const std::size_t at = std::size_t{s} * run.tokens + i;
    if constexpr (P::kInfo.needs != Needs::nothing)
      P::observe(slot, run.seen[at], params, run.step[s]);
    run.ranks[at] = P::rank(slot, token, params, run.step[s]);
  }
  if constexpr (!std::is_empty_v<typename P::Slot>)
    reinterpret_cast<typename P::Slot*>(run.slots)[i] = slot;
  if constexpr (P::kInfo.weighted)
    run.weights[i] = i < P::tail(params) ? P::weight(i, params) : 0.0f;
  else
    run.weights[i] = 1.0f;
}

/// A thread for each token of a step (blockIdx.y): its place in the order of leaving.
inline __global__ void place_tokens(ProbeRun run) {
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

template <Policy P>
cudaError_t launch_probe(const ProbeRun& run, std::span<const double> params, cudaStream_t stream) {
  if (run.tokens == 0 || run.steps == 0) return cudaErrorInvalidValue;
  const unsigned blocks = (run.tokens + kProbeThreads - 1) / kProbeThreads;
  run_states<P><<<blocks, kProbeThreads, 0, stream>>>(run, params_from<P>(params.data()));
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  place_tokens<<<dim3(blocks, run.steps), kProbeThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

template <Policy P>
DeviceProbe probe_of() {
  return {.name = P::kInfo.name,
          .slot_bytes = std::is_empty_v<typename P::Slot> ? 0 : sizeof(typename P::Slot),
          .launch = launch_probe<P>};
}

}  // namespace kvlab
