// One policy compiled for the device: see probe_args.hpp.
#pragma once

#include "kernels/evict/probe_args.hpp"
#include "policies/bytes.hpp"

namespace kvlab {

/// Launched with one thread for each token, which goes through all steps.
template <Policy P>
__global__ void run_states(ProbeArgs args, typename P::Params params) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= args.tokens) return;
  constexpr int features = static_cast<int>(P::kInfo.feature_count());
  Token token{i};
  for (int c = 0; c < features; ++c) token.feature[c] = args.features[i * features + c];
  typename P::Slot slot;
  P::append(slot, token, params, args.step[0]);
  for (std::uint32_t s = 0; s < args.steps; ++s) {
    const std::size_t at = std::size_t{s} * args.tokens + i;
    if constexpr (P::kInfo.needs != Needs::nothing)
      P::observe(slot, args.seen[at], params, args.step[s]);
    args.ranks[at] = rank_key(P::rank(slot, token, params, args.step[s]));
  }
  if constexpr (!std::is_empty_v<typename P::Slot>)
    reinterpret_cast<typename P::Slot*>(args.slots)[i] = slot;
  if constexpr (P::kInfo.weighted)
    args.weights[i] = i < P::tail(params) ? P::weight(i, params) : 0.0f;
  else
    args.weights[i] = 1.0f;
}

}  // namespace kvlab
