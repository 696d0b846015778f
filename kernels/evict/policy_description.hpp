// A policy's description for the host. Device code fills it in, because only the device compiler
// has compiled the policy.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// See DevicePolicy.
struct PolicyDescription {
  static constexpr std::uint32_t kMaxParams = 32, kMaxNameBytes = 64;

  Needs needs;
  bool evicts, oldest_first, weighted;
  RankType rank_type;
  std::uint32_t slot_bytes, feature_count;
  char features[kMaxFeatures][kMaxNameBytes];
  std::uint32_t param_count;           ///< number of doubles in Params
  std::uint32_t param_of[kMaxParams];  ///< for each double of Params: its index in kParams
  double min_values[kMaxParams], max_values[kMaxParams];  ///< by index in kParams

  constexpr bool operator==(const PolicyDescription&) const = default;
};

template <Policy P>
constexpr PolicyDescription describe() {
  PolicyDescription about{.needs = P::kInfo.needs,
                          .evicts = P::kInfo.evicts,
                          .oldest_first = P::kInfo.oldest_first,
                          .weighted = P::kInfo.weighted,
                          .rank_type = kRankType<P>,
                          .slot_bytes = kSlotBytes<P>,
                          .feature_count = P::kInfo.feature_count()};
  for (std::uint32_t c = 0; c < about.feature_count; ++c)
    for (std::uint32_t i = 0; i == 0 || about.features[c][i - 1] != '\0'; ++i)
      about.features[c][i] = P::kInfo.features[c][i];  // a name that is too long does not compile
  if constexpr (kParamsBytes < P >> 0) {
    constexpr std::uint32_t kCount = sizeof(P::kParams) / sizeof(P::kParams[0]);
    static_assert(kCount <= PolicyDescription::kMaxParams, "policy: has more than 32 parameters");
    static_assert(kCount * sizeof(double) == kParamsBytes<P>,
                  "policy: each double of Params needs a line of kParams");
    struct Doubles {
      double at[kCount];
    };
    double numbers[kCount] = {};
    for (std::uint32_t i = 0; i < kCount; ++i) {
      numbers[i] = i;
      about.min_values[i] = P::kParams[i].min_value;
      about.max_values[i] = P::kParams[i].max_value;
    }
    const auto params = std::bit_cast<Doubles>(params_from<P>(numbers));
    about.param_count = kCount;
    for (std::uint32_t i = 0; i < kCount; ++i)
      about.param_of[i] = static_cast<std::uint32_t>(params.at[i]);
  }
  return about;
}

}  // namespace kvlab::kernels
