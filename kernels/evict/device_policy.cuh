// The four small kernels that are instantiated for each policy of the registry. (The replay's walk
// is compiled at run time, when it is needed.)
#pragma once

#include <iterator>
#include <limits>

#include "kernels/evict/compact.cuh"
#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/observing_attention.cuh"
#include "kernels/evict/plain_eviction.cuh"
#include "kernels/evict/policy_probe.cuh"
#include "policies/bytes.hpp"
#include "policies/order_hooks.hpp"

namespace kvlab::kernels {

template <Policy P>
typename P::Params params_at(const void* params) {
  if constexpr (kParamsBytes<P> == 0)
    return {};
  else
    return *static_cast<const typename P::Params*>(params);
}

template <Policy P>
float weight_of(std::uint32_t age, const void* params) {
  if constexpr (P::kInfo.weighted)
    return P::weight(age, params_at<P>(params));
  else
    return 1;
}

template <Policy P>
std::uint32_t tail_of(const void* params) {
  if constexpr (P::kInfo.weighted)
    return P::tail(params_at<P>(params));
  else
    return kNoTail;
}

/// Default of the parameter `index`; NaN if there is no such parameter.
template <Policy P>
double param_default(std::size_t index) {
  if constexpr (kParamsBytes < P >> 0)
    if (index < std::size(P::kParams)) return P::kParams[index].standard;
  return std::numeric_limits<double>::quiet_NaN();
}

template <Policy P>
DevicePolicy device_policy_of(std::string_view header, std::string_view type) {
  return {.name = P::kInfo.name,
          .needs = P::kInfo.needs,
          .evicts = P::kInfo.evicts,
          .oldest_first = P::kInfo.oldest_first,
          .weighted = P::kInfo.weighted,
          .rank_type = kRankType<P>,
          .features = std::span(P::kInfo.features).first(P::kInfo.feature_count()),
          .slot_bytes = kSlotBytes<P>,
          .params_bytes = kParamsBytes<P>,
          .params = write_params<P>,
          .param_name = param_name<P>,
          .param_default = param_default<P>,
          .weight = weight_of<P>,
          .tail = tail_of<P>,
          .header = header,
          .type = type,
          .observe_pairs = reinterpret_cast<const void*>(observe_pairs<P>),
          .evict = reinterpret_cast<const void*>(evict_kernel<P>),
          .settle_tokens = reinterpret_cast<const void*>(settle_tokens<P>),
          .run_states = reinterpret_cast<const void*>(run_states<P>)};
}

/// Appends the policy, unless it has hooks that the device does not call.
template <class P>
void add_device_policy(std::vector<DevicePolicy>& all, std::string_view header,
                       std::string_view type) {
  if constexpr (!hooks::HasEvicted<P> && !hooks::HasReorder<P>)
    all.push_back(device_policy_of<P>(header, type));
}

}  // namespace kvlab::kernels
