// Observations that are computed by a hash of the token's position. So the observation of a token
// does not depend on which other tokens are live.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "policies/policy.hpp"
#include "traces/base/split_mix.hpp"

namespace kvlab {

/// The observation of the token at `position` from the `count` queries starting at `first`. About
/// every third token is not requested, and masses are often equal.
constexpr Observation sample_observation(std::uint32_t position, std::uint32_t first,
                                         std::uint32_t count) {
  const std::uint64_t bits = split_mix(std::uint64_t{position} << 32 | first);
  const std::uint32_t queries = std::min(count, first + count - position);  // causal
  Observation seen{.mass = bits % 4 ? (bits >> 40) << 12 : (bits >> 8) % 3, .queries = queries};
  if (bits % 3) {
    seen.requests = 1 + static_cast<std::uint32_t>(bits >> 20) % queries;
    seen.last_request = first + count - 1 - static_cast<std::uint32_t>(bits >> 50) % queries;
  }
  return seen;
}

/// Feature `which` of the token at `position`. Values are positive or negative, and many tokens
/// have equal values.
constexpr float sample_feature(std::uint32_t position, std::uint32_t which) {
  const std::uint64_t bits = split_mix(std::uint64_t{position} << 8 | which);
  return static_cast<float>(static_cast<std::int64_t>(bits % 4 ? bits % 2000 : bits % 7) - 1000) /
         8;
}

/// The features of the `count` tokens starting at `first`, [token, features].
inline std::vector<float> sample_features(std::uint32_t first, std::uint32_t count,
                                          std::size_t features) {
  std::vector<float> all;
  for (std::uint32_t position = first; position < first + count; ++position)
    for (std::size_t c = 0; c < features; ++c)
      all.push_back(sample_feature(position, static_cast<std::uint32_t>(c)));
  return all;
}

}  // namespace kvlab
