// State and parameters of a policy as bytes, for code that does not know their types.
#pragma once

#include <cstddef>
#include <iterator>
#include <span>

#include "policies/policy_checks.hpp"

namespace kvlab {

/// Bytes of one token's state; 0 if the policy keeps none.
template <class P>
inline constexpr std::size_t kSlotBytes = std::is_empty_v<typename P::Slot>
                                              ? 0
                                              : sizeof(typename P::Slot);
/// Bytes of the parameters; 0 if the policy has none.
template <class P>
inline constexpr std::size_t kParamsBytes = std::is_empty_v<typename P::Params>
                                                ? 0
                                                : sizeof(typename P::Params);

/// Makes P's Params from one value for each entry of kParams.
template <class P>
constexpr typename P::Params params_from(const double* values) {
  typename P::Params params{};
  if constexpr (!std::is_empty_v<typename P::Params>)
    for (const auto& param : P::kParams) params.*(param.member) = *values++;
  return params;
}

/// Name of the entry `index` of kParams; null if there is no such entry.
template <class P>
constexpr const char* param_name(std::size_t index) {
  if constexpr (!std::is_empty_v<typename P::Params>)
    if (index < std::size(P::kParams)) return P::kParams[index].name;
  return nullptr;
}

/// Writes P's Params (kParamsBytes) to `to`, from one value for each entry of kParams. Returns
/// false and writes nothing if a value is out of range.
template <class P>
bool write_params(std::span<const double> values, std::byte* to) {
  if constexpr (!std::is_empty_v<typename P::Params>) {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!in_range(values[i], P::kParams[i].min_value, P::kParams[i].max_value)) return false;
    const typename P::Params params = params_from<P>(values.data());
    const auto* const from = reinterpret_cast<const std::byte*>(&params);
    // byte by byte, because `to` may be unaligned
    for (std::size_t i = 0; i < sizeof params; ++i) to[i] = from[i];
  }
  return true;
}

}  // namespace kvlab
