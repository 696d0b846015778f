// One policy compiled for the device: see policy_probe.hpp.
#pragma once

#include "kernels/evict/policy_probe.hpp"
#include "policies/bytes.hpp"

namespace kvlab {

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

}  // namespace kvlab
