// The eviction order, the same for all policies and all executors: by protection, then by the
// policy's rank, then by age.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

namespace kvlab {

/// The token with the smallest key is evicted first.
struct EvictionKey {
  std::uint32_t protection;
  std::uint64_t rank;
  std::uint32_t position;

  /// A key that comes after the key of every token.
  static constexpr EvictionKey last() { return {~0u, ~std::uint64_t{0}, ~0u}; }

  constexpr bool operator==(const EvictionKey&) const = default;
  constexpr bool operator<(const EvictionKey& other) const {
    if (protection != other.protection) return protection < other.protection;
    if (rank != other.rank) return rank < other.rank;
    return position < other.position;
  }
};

/// Numbers of protected tokens, resolved for a budget. The eviction rule applies them to every
/// policy.
struct ProtectedTokens {
  std::uint32_t sinks = 0;   ///< positions below this are evicted last
  std::uint32_t recent = 0;  ///< the youngest tokens, including the next one to be appended

  /// 0: unprotected, 1: recent, 2: sink. Tokens of lower protection are evicted first.
  constexpr std::uint32_t protection(std::uint32_t position, std::uint32_t now) const {
    if (position < sinks) return 2;
    return std::uint64_t{position} + recent > now ? 1 : 0;
  }
  /// Number of unprotected positions before `now`: the positions after the sinks and before the
  /// recent tokens. Requires fewer than 2^31 protected tokens.
  constexpr std::uint32_t num_unprotected(std::uint32_t now) const {
    const std::uint32_t kept = sinks + (recent == 0 ? 0 : recent - 1);
    return now > kept ? now - kept : 0;
  }
  /// The key of a token with this rank, if position `now` is appended next.
  constexpr EvictionKey key(std::uint64_t rank, std::uint32_t position, std::uint32_t now) const {
    return {protection(position, now), rank, position};
  }
};

/// A token that may be evicted: its key, and its slot on a device or its age on the host.
struct EvictionCandidate {
  EvictionKey key;
  int slot;

  /// A candidate that comes after every token.
  static constexpr EvictionCandidate none() { return {EvictionKey::last(), -1}; }
  /// A candidate that comes after every unprotected token. Use it if only unprotected tokens are
  /// compared; then protections need not be compared.
  static constexpr EvictionCandidate none_unprotected() {
    return {{0, ~std::uint64_t{0}, ~0u}, -1};
  }
};

/// The candidate that is evicted first.
constexpr EvictionCandidate first_victim(const EvictionCandidate& a, const EvictionCandidate& b) {
  return b.key < a.key ? b : a;
}

}  // namespace kvlab
