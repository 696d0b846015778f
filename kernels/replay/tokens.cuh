// The simplest class that manages the tokens of a cache: for exact tokens at original positions.
// Its methods are the interface that a cache and its walk use. The classes for cache positions
// (cache_positions.cuh) and tiers (tiers.cuh) redefine the methods in which they differ.
#pragma once

#include "kernels/replay/direct.cuh"

namespace kvlab::kernels {

/// kShared: slots are in shared memory. T: type of keys and values. All threads of the thread block
/// call each method, except enter().
template <bool kShared, class T>
class ExactTokens {
 public:
  using Args = ReplayWalkArgs;
  static constexpr bool kInShared = kShared;
  static constexpr bool kCachePositions = false, kTiered = false;

  /// Bytes of shared memory that this class needs between the bits of the live positions and the
  /// slots.
  __device__ static std::size_t bytes_before_slots(const Args&) { return 0; }
  /// The parameters after `shared`: the memory of bytes_before_slots(); memory for data of all
  /// slots, if slots are in shared memory (it follows the states and positions); the positions, by
  /// slot; and the number of slots.
  __device__ ExactTokens(const CacheThread& at, ReplayShared& shared, std::byte*, std::byte*,
                         const std::uint32_t*, std::uint32_t)
      : at_(at), shared_(shared) {}

  // Data of a slot in addition to its state and position.

  __device__ void move_in(std::uint32_t) {}
  __device__ void move_out(std::uint32_t) const {}
  __device__ void append(std::uint32_t, std::uint32_t) {}
  __device__ void move(std::uint32_t, std::uint32_t) {}

  // Events that concern all tokens.

  /// Called after the contents of slots [0, live) have changed.
  __device__ void find(std::uint32_t) {}
  /// Called by one thread when one token has been appended.
  __device__ void enter(std::uint32_t) {}
  /// Called when the token at position `victim` is evicted so that one token can be appended.
  /// lose_many() is called when all tokens for which stays(slot) is false are evicted.
  __device__ void lose(std::uint32_t, std::uint32_t) {}
  template <class Stays>
  __device__ void lose_many(std::uint32_t, Stays) {}
  /// Called when the kept tokens are in slots [0, live), before position `now` is appended.
  __device__ void renumber(std::uint32_t, std::uint32_t) {}
  /// Called when more than one token has been appended or evicted.
  __device__ void move_all() {}

  // Exponentials for a query.

  /// The row of exponentials for query i of the block.
  template <int kHeadGroups>
  __device__ const float4* row(int i) const {
    return at_.args.rows.e + at_.row(i) * kHeadGroups * at_.args.shape.tokens;
  }
  /// Computes the direct exponentials of slots [0, live) for query i of the block. With `ahead`,
  /// also for the later queries of its query group.
  template <int kHeadGroups>
  __device__ void attend(int, std::uint32_t, bool) {}
  /// Whether the exponentials of the token in a slot are direct.
  __device__ bool is_direct(std::uint32_t) const { return false; }
  /// No token at this position or a later one has a direct exponential: the row contains the
  /// exponentials of these tokens.
  __device__ std::uint32_t evicted_end() const { return 0; }
  __device__ const std::uint32_t* positions_in_cache() const { return nullptr; }
  /// Returns a map from slots to copies. Tokens from position `exact_from` on belong to copy 0.
  __device__ ExactCopies copies(std::uint32_t) const { return {}; }

  /// Multiplies direct exponentials by values, and writes the sums to `to` [group, dim].
  template <int kHeadGroups, class Copies>
  __device__ void sum_values(const DirectValues& values, const Copies&, float* to) const {
    sum_direct_values<kHeadGroups, FourBits<T>>(at_.args, values, shared_.scratch, to);
  }

 protected:
  const CacheThread& at_;
  ReplayShared& shared_;
};

}  // namespace kvlab::kernels
