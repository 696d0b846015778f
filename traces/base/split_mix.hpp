// SplitMix64 (Steele et al. 2014), on the host.
#pragma once

#include <cstdint>

namespace kvlab {

/// The amount by which the generator's state grows per number.
inline constexpr std::uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;

/// The random number that the generator produces from `state`.
constexpr std::uint64_t split_mix(std::uint64_t state) {
  state += kSplitMixStep;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

}  // namespace kvlab
