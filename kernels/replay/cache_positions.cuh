// Tokens numbered by cache position: computes the cache position of each token, and the
// exponentials of old tokens.
#pragma once

#include "kernels/replay/old_keys.cuh"
#include "kernels/replay/tokens.cuh"

namespace kvlab::kernels {

/// Positions [first, end).
struct PositionRange {
  std::uint32_t first, end;

  __device__ static PositionRange all() { return {0, ~0u}; }
  __device__ static PositionRange none() { return {0, 0}; }
  __device__ bool empty() const { return first >= end; }
  __device__ bool has(std::uint32_t position) const { return position - first < end - first; }
  /// Extends the range to include the other one.
  __device__ void take(const PositionRange& other) {
    if (other.empty()) return;
    *this = empty() ? other : PositionRange{min(first, other.first), max(end, other.end)};
  }
};

template <bool kShared, class T>
class CachePositionTokens : public ExactTokens<kShared, T> {
  using Base = ExactTokens<kShared, T>;
  using Base::at_, Base::shared_;
  static constexpr int kStrip = replay_strip(true);

 public:
  using Args = ReplayCachePositionArgs;
  static constexpr bool kCachePositions = true;

  __device__ static std::size_t bytes_before_slots(const Args& args) {
    return OldKeyLayout(args.shape).bytes();
  }
  __device__ CachePositionTokens(const CacheThread& at, ReplayShared& shared, std::byte* before,
                                 std::byte* rest, const std::uint32_t* positions,
                                 std::uint32_t slots)
      : Base(at, shared, before, rest, positions, slots),
        args_(static_cast<const Args&>(at.args)),
        stage_(args_, at.task, before),
        positions_(positions),
        gone_(args_.progress[at.cache()].gone) {
    if constexpr (kShared) {
      positions_in_cache_ = reinterpret_cast<std::uint32_t*>(rest);
      listed_ = reinterpret_cast<OldItem*>(positions_in_cache_ + slots);
    } else {
      positions_in_cache_ = args_.positions_in_cache + at.first_slot;
      listed_ = reinterpret_cast<OldItem*>(args_.slots.ranks + at.first_slot);
    }
    if (at.thread == 0) shared.listed = 0;
  }

  __device__ void move_in(std::uint32_t i) {
    positions_in_cache_[i] = args_.positions_in_cache[at_.first_slot + i];
  }
  __device__ void move_out(std::uint32_t i) const {
    args_.positions_in_cache[at_.first_slot + i] = positions_in_cache_[i];
  }
  __device__ void append(std::uint32_t i, std::uint32_t position) {
    positions_in_cache_[i] = position;
  }

  /// Updates cache positions when the token at position `victim` is evicted before one token is
  /// appended. The cache positions of tokens older than the victim grow by one, as that of the
  /// query does, so their distance to the next query stays the same. Old tokens that are younger
  /// than the victim keep their cache positions, so their distance to the next query grows, and
  /// their exponentials have to be computed again. If the victim was not old, all tokens before it
  /// become old.
  __device__ void lose(std::uint32_t victim, std::uint32_t live) {
    at_.template for_slots<kStrip>(
        live, [&](std::uint32_t i) { positions_in_cache_[i] += positions_[i] < victim ? 1 : 0; });
    moved_.take(victim < gone_ ? PositionRange{victim + 1, gone_} : PositionRange{gone_, victim});
    gone_ = max(gone_, victim + 1);
  }
  template <class Stays>
  __device__ void lose_many(std::uint32_t live, Stays stays) {
    for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
      if (!stays(i)) atomicMax(&shared_.gone, positions_[i] + 1);
  }
  __device__ void renumber(std::uint32_t live, std::uint32_t now) {
    __syncthreads();  // the inner loop below is compiled to reads of four positions, also past the
                      // last live one
    gone_ = max(gone_, shared_.gone);
    for (std::uint32_t i = at_.thread; i < live; i += at_.threads) {
      std::uint32_t younger = 0;
      for (std::uint32_t j = 0; j < live; ++j) younger += positions_[j] > positions_[i] ? 1 : 0;
      positions_in_cache_[i] = now - 1 - younger;
    }
  }
  __device__ void move_all() { moved_ = PositionRange::all(); }

  template <int kHeadGroups>
  __device__ const float4* row(int i) const {
    return args_.cache_positions.e + at_.row(i) * kHeadGroups * args_.shape.tokens;
  }
  /// Computes the exponentials of old tokens for query i, except those that an earlier call has
  /// already computed. With `ahead`, computes them also for the later queries of the query group.
  template <int kHeadGroups>
  __device__ void attend(int i, std::uint32_t live, bool ahead) {
    PositionRange range = ahead && i % kReplayAhead != 0 ? moved_ : PositionRange::all();
    moved_ = ahead ? PositionRange::none() : PositionRange::all();
    range.end = min(range.end, gone_);
    if (range.empty()) return;
    const int query_group = i / kReplayAhead, first = query_group * kReplayAhead,
              end = ahead ? min(first + kReplayAhead, args_.rows.count) : i + 1;
    stage_.take(query_group);
    list(range, live, static_cast<std::uint32_t>(args_.rows.first + i),
         static_cast<std::uint32_t>(i - first), static_cast<std::uint32_t>(end - first));
    take_old_keys<kHeadGroups, T>(args_, at_.task, at_.rule.first_slot, stage_.memory(),
                                  {listed_, shared_.listed, positions_});
    __syncthreads();
    if (at_.thread == 0) shared_.listed = 0;
  }
  __device__ bool is_direct(std::uint32_t i) const { return positions_[i] < gone_; }
  __device__ std::uint32_t evicted_end() const { return gone_; }
  __device__ const std::uint32_t* positions_in_cache() const { return positions_in_cache_; }

 private:
  /// Lists the live tokens with positions in `range`, in any order: the slot of each and its
  /// distance to `query`. The items are for queries [first_of_query_group, end) of the query group.
  __device__ void list(const PositionRange& range, std::uint32_t live, std::uint32_t query,
                       std::uint32_t first_of_query_group, std::uint32_t end) {
    for (std::uint32_t first = at_.template first_slot_of_thread<kStrip>(); first - at_.lane < live;
         first += kStrip * at_.threads) {
      std::uint32_t masks[kStrip], count = 0;
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        masks[k] = __ballot_sync(~0u, slot < live && range.has(positions_[slot]));
        count += __popc(masks[k]);
      }
      std::uint32_t before = 0;
      if (count != 0 && at_.lane == 0) before = atomicAdd(&shared_.listed, count);
      before = __shfl_sync(~0u, before, 0);
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        if (masks[k] >> at_.lane & 1)
          listed_[before + __popc(masks[k] & ((1u << at_.lane) - 1))] =
              OldItem::make(slot, query - positions_in_cache_[slot], first_of_query_group, end);
        before += __popc(masks[k]);
      }
    }
    __syncthreads();
  }

  const Args& args_;
  OldKeyStage stage_;
  const std::uint32_t* positions_;
  std::uint32_t* positions_in_cache_;  // [slot]
  OldItem* listed_;                    // [slot]
  /// Old tokens whose distance to the query has changed since their exponentials were computed.
  PositionRange moved_ = PositionRange::all();
  std::uint32_t gone_;  ///< one past the position of the youngest evicted token
};

}  // namespace kvlab::kernels
