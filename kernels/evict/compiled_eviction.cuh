// Eviction by one policy as compiled with kvlab: what the registry's lists are made of.
#pragma once

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/evict/observing_attention.cuh"
#include "kernels/evict/plain_eviction.cuh"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

template <Policy P>
EvictionKernels described(const void* kernel) {
  return {.name = P::kInfo.name,
          .needs = P::kInfo.needs,
          .oldest_first = P::kInfo.oldest_first,
          .slot_bytes = kSlotBytes<P>,
          .params_bytes = kParamsBytes<P>,
          .params = write_params<P>,
          .kernel = kernel,
          .attention_workspace = nullptr,
          .attend = nullptr,
          .observe = nullptr};
}

template <Policy P>
EvictionKernels observing_kernels_of() {
  return observing_kernels(described<P>(reinterpret_cast<const void*>(observe_pairs<P>)));
}

template <Policy P>
EvictionKernels plain_kernels_of() {
  return plain_kernels(described<P>(reinterpret_cast<const void*>(evict_kernel<P>)));
}

}  // namespace kvlab::kernels
