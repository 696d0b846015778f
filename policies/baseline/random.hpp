// random: evicts a random token, which is sampled anew at each step. Any useful policy should be
// better.
//
// The sample is a counter-based hash of (seed, sequence, layer, KV head, position, now), so it
// needs no state and is the same on host and device. A fixed order (a hash of the position alone)
// would be worse than random. After some evictions, only tokens with a high hash would be left, so
// most new tokens would be evicted right after they were appended.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Random {
  static constexpr PolicyInfo kInfo{
      .name = "random",
      .summary = "evicts a random token at each step",
      .citation =
          "SplitMix64 finalizer: Steele et al. 2014, section 4 (doi:10.1145/2660193.2660195)",
      .order = Order::nested};
  struct Params {};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step& step) {
    return sample(token.position, step) >> kSpare;
  }
  /// 64 random bits for the token at `position` of the cache at the time of `step`.
  static constexpr std::uint64_t sample(std::uint32_t position, const Step& step) {
    const std::uint64_t head = std::uint64_t{step.layer} << 32 | step.kv_head;
    const std::uint64_t when = std::uint64_t{position} << 32 | step.now;
    return mix(mix(mix(mix(step.seed) ^ step.sequence) ^ head) ^ when);
  }

 private:
  /// Bits that samples leave unused, so that sums over a layer's KV heads do not overflow
  /// (scope=layer).
  static constexpr int kSpare = 8;

  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
};

}  // namespace kvlab
