// What a cache and its walk ask of the way in which tokens are kept, and the plainest: at original
// positions, all exact. Cache positions (cache_positions.cuh) and those on tiers (tiers.cuh) hide
// what they do otherwise.
#pragma once

#include "kernels/replay/direct.cuh"

namespace kvlab::kernels {

/// kShared: slots lie in shared memory. T: of keys and values. Methods are called by all threads of
/// the thread block.
template <bool kShared, class T>
class ExactTokens {
 public:
  using Args = ReplayWalkArgs;
  static constexpr bool kInShared = kShared;
  static constexpr bool kCachePositions = false, kTiered = false;

  /// Bytes of shared memory before the slots, behind the bits of the live positions.
  __device__ static std::size_t bytes_before_slots(const Args&) { return 0; }
  /// `before`: that memory; `behind`: what there is for all slots behind states and positions,
  /// where they are in shared memory; `positions`: by slot.
  __device__ ExactTokens(const CacheThread& at, ReplayShared& shared, std::byte*, std::byte*,
                         const std::uint32_t*, std::uint32_t)
      : at_(at), shared_(shared) {}

  // What is kept of each slot beside state and position.

  __device__ void move_in(std::uint32_t) {}
  __device__ void move_out(std::uint32_t) const {}
  __device__ void append(std::uint32_t, std::uint32_t) {}
  __device__ void move(std::uint32_t, std::uint32_t) {}

  // What is known of all tokens.

  /// Slots [0, live) have been filled anew.
  __device__ void find(std::uint32_t) {}
  /// One token has entered, alone: by one thread.
  __device__ void enter(std::uint32_t) {}
  /// The token at `victim` leaves, for one to enter; or all that do not stay.
  __device__ void lose(std::uint32_t, std::uint32_t) {}
  template <class Stays>
  __device__ void lose_many(std::uint32_t, Stays) {}
  /// Those that stay are in [0, live), and `now` comes next.
  __device__ void renumber(std::uint32_t, std::uint32_t) {}
  /// More than one has entered or left.
  __device__ void move_all() {}

  // What a query is given.

  /// The row for query i of the block.
  template <int kHeadGroups>
  __device__ const float4* row(int i) const {
    return at_.args.rows.e + at_.row(i) * kHeadGroups * at_.args.shape.tokens;
  }
  /// Makes the direct exponentials of [0, live) for query i of the block, and with `ahead` for
  /// those behind it that nobody enters with.
  template <int kHeadGroups>
  __device__ void attend(int, std::uint32_t, bool) {}
  /// Whether a token's exponentials are direct.
  __device__ bool is_direct(std::uint32_t) const { return false; }
  /// Exponentials of all tokens from this position on are a row's.
  __device__ std::uint32_t evicted_end() const { return 0; }
  __device__ const std::uint32_t* places() const { return nullptr; }
  /// Of tokens before `exact_from`.
  __device__ ExactCopies copies(std::uint32_t) const { return {}; }

  /// Direct exponentials by values to `to` [group, dim].
  template <int kHeadGroups, class Copies>
  __device__ void sum_values(const DirectValues& of, const Copies&, float* to) const {
    sum_direct_values<kHeadGroups, FourBits<T>>(at_.args, of, shared_.scratch, to);
  }

 protected:
  const CacheThread& at_;
  ReplayShared& shared_;
};

}  // namespace kvlab::kernels
