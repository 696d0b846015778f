// A policy's weights of queries, computed on the device because the host has not compiled the
// policy's hook.
#pragma once

#include <bit>

#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// Writes the policy's tail to to[0]: queries of this age or older have weight 0. For each age,
/// writes the bits of a query's weight to to[1 + age].
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
