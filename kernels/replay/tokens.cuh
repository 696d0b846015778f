// The interface between a cache, its walk, and the way in which tokens are kept; and the simplest
// implementation: exact tokens at original positions. The classes for cache positions
// (cache_positions.cuh) and tiers (tiers.cuh) hide what they do differently.
#pragma once

#include "kernels/replay/direct.cuh"

namespace kvlab::kernels {

/// kShared: slots lie in shared memory. T: type of keys and values. All threads of the thread block
/// call each method.
template <bool kShared, class T>
class ExactTokens {
 public:
  using Args = ReplayWalkArgs;
  static constexpr bool kInShared = kShared;
  static constexpr bool kCachePositions = false, kTiered = false;

  /// Bytes of shared memory between the bits of the live positions and the slots.
  __device__ static std::size_t bytes_before_slots(const Args&) { return 0; }
  /// `before`: that memory; `behind`: memory for all slots after states and positions, if they are
  /// in shared memory; `positions`: by slot.
  __device__ ExactTokens(const CacheThread& at, ReplayShared& shared, std::byte*, std::byte*,
                         const std::uint32_t*, std::uint32_t)
      : at_(at), shared_(shared) {}

  // Data of each slot in addition to state and position.

  __device__ void move_in(std::uint32_t) {}
  __device__ void move_out(std::uint32_t) const {}
  __device__ void append(std::uint32_t, std::uint32_t) {}
  __device__ void move(std::uint32_t, std::uint32_t) {}

  // Events that concern all tokens.

  /// Slots [0, live) have been filled again.
  __device__ void find(std::uint32_t) {}
  /// One token has been appended. Called by one thread.
  __device__ void enter(std::uint32_t) {}
  /// The token at `victim` is evicted, for one to be appended; or all tokens that do not stay.
  __device__ void lose(std::uint32_t, std::uint32_t) {}
  template <class Stays>
  __device__ void lose_many(std::uint32_t, Stays) {}
  /// Tokens that stay are in slots [0, live); position `now` comes next.
  __device__ void renumber(std::uint32_t, std::uint32_t) {}
  /// More than one token has been appended or evicted.
  __device__ void move_all() {}

  // Exponentials for a query.

  /// The row for query i of the block.
  template <int kHeadGroups>
  __device__ const float4* row(int i) const {
    return at_.args.rows.e + at_.row(i) * kHeadGroups * at_.args.shape.tokens;
  }
  /// Computes the direct exponentials of slots [0, live) for query i of the block and, with
  /// `ahead`, for the later queries of its query group.
  template <int kHeadGroups>
  __device__ void attend(int, std::uint32_t, bool) {}
  /// Whether a token's exponentials are direct.
  __device__ bool is_direct(std::uint32_t) const { return false; }
  /// From this position on, all tokens' exponentials are a row's.
  __device__ std::uint32_t evicted_end() const { return 0; }
  __device__ const std::uint32_t* positions_in_cache() const { return nullptr; }
  /// Maps slots to copies, for tokens before `exact_from`.
  __device__ ExactCopies copies(std::uint32_t) const { return {}; }

  /// Multiplies direct exponentials by values, into `to` [group, dim].
  template <int kHeadGroups, class Copies>
  __device__ void sum_values(const DirectValues& of, const Copies&, float* to) const {
    sum_direct_values<kHeadGroups, FourBits<T>>(at_.args, of, shared_.scratch, to);
  }

 protected:
  const CacheThread& at_;
  ReplayShared& shared_;
};

}  // namespace kvlab::kernels
