// A policy's weights of queries, computed on the device because the host has no compiled hook.
#pragma once

#include <bit>

#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// Writes to to[0] the policy's tail, the age from which on weights are 0, and to to[1 + age] the
/// bits of the weight of a query of each age.
template <Policy P>
__global__ void weigh_queries(typename P::Params params, std::uint32_t queries, std::uint32_t* to) {
  const std::uint32_t age = blockIdx.x * blockDim.x + threadIdx.x;
  std::uint32_t tail = kNoTail;
  float weight = 1;
  if constexpr (P::kInfo.weighted) {
    tail = P::tail(params);
    weight = age < tail ? P::weight(age, params) : 0.0f;
  }
  if (age == 0) to[0] = tail;
  if (age < queries) to[1 + age] = std::bit_cast<std::uint32_t>(weight);
}

}  // namespace kvlab::kernels
