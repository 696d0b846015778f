// Processes a block of queries in the caches of one policy. A thread block handles one cache (one
// head task under one configuration) and processes the queries in order. replay.hpp defines the
// terms: row, direct, kept set, copy, fp16 copy, member. ReplayCache (cache.cuh) has the slots, and
// evicts and ranks; this file computes what they and the metrics need at each query:
//
//   step(i)  first query of an append    cache_.begin(): evict to the budget, append
//            query is needed             look(): totals of the exponentials of the visible tokens
//               measured                    measure(): what recall and misses are computed from
//               observed                    observe(): states or, in a long append, `seen`
//               output or gradient          store_kept(): for replay_outputs(), replay_changes()
//            last query of an append     observe_all(), rank_all(): the next append's victims
//
// The exponentials of a token at a query come from one of three places: from the full row, from the
// row of the token's copy (tiers) or of unrounded vectors (cache positions), or from the direct
// exponentials, which the cache computes itself. look() switches all tokens to direct exponentials
// if the sum over the others has lost precision (is_lost()).
//
// Memory traffic: 16 bytes of exponentials per head group for each live token and query. They come
// from the L2 cache, because all caches of a head task read the same rows. If the slots fit, they
// stay in shared memory during the block.
#pragma once

#include "kernels/replay/cache.cuh"
#include "kernels/replay/metrics.cuh"
#include "kernels/replay/observe.cuh"
#include "kernels/replay/totals.cuh"

namespace kvlab::kernels {

/// P is the policy. For kLargest see QueryLook, and for Tokens see ReplayCache.
template <class P, int kHeadGroups, bool kLargest, class Tokens>
class ReplayWalk {
  using Cache = ReplayCache<P, Tokens>;
  using Exponentials = HeadGroups<kHeadGroups>;
  using Look = QueryLook<P, kHeadGroups, kLargest>;
  static constexpr bool kObserves = P::kInfo.needs != Needs::nothing;
  static constexpr bool kNeedsRequests = needs_requests(P::kInfo.needs);
  static constexpr bool kTiered = Tokens::kTiered;
  static constexpr int kHeads = 4 * kHeadGroups;
  static constexpr int kStrip = Cache::kStrip;

  /// Whether a cache's exponentials may differ from those of the full row. If so, recall is
  /// computed from separate totals of the full row (total_full()).
  static constexpr bool kOther = Tokens::kCachePositions || kTiered;
  using Totals = ReplayTotals<kHeadGroups, kOther, kNeedsRequests>;
  static constexpr int kFullPart = Totals::kFullPart, kMaxPart = Totals::kMaxPart;
  /// The exponentials of the slots that a thread processes together (CacheThread::for_slots()).
  struct Strip {
    Exponentials e[kStrip];
  };

 public:
  __device__ ReplayWalk(const CacheThread& at, ReplayShared& shared, std::byte* dynamic)
      : at_(at), shared_(shared), cache_(at, shared, dynamic) {
    for (std::uint32_t n = at.thread; n < kMaxReplayQueries * kMaxReplayGroup; n += at.threads)
      (&shared.hits[0][0])[n] = 0;
    __syncthreads();
  }

  __device__ void walk() {
    for (int i = 0; i < at_.args.rows.count; ++i) step(i);
    __syncthreads();
    if (at_.args.sums) store_counts(at_, shared_);
    cache_.move_out();
  }

 private:
  __device__ void step(int i) {
    const ReplayWalkArgs& args = at_.args;
    const std::uint32_t query = args.rows.first + i;
    const ReplayAppend now = cache_.now();
    if (query == now.first) cache_.begin();
    // Younger queries of the append. Their tokens are live already, but not visible to this query.
    const std::uint32_t age = now.first + now.tokens - 1 - query;
    visible_ = cache_.live() - age;
    const int index = args.measured.index[query];
    const bool observes = kObserves && (kNeedsRequests || age < tail());
    if (observes || index >= 0) look(i, query, age, index, observes);
    if (args.kept_bits) note_kept(query);
    if (age > 0) return;
    if (now.tokens > 1) observe_all(now);
    // In the other cases, observe_alone() has ranked the tokens.
    if (kTiered || !kObserves || now.tokens > 1 || !observes) rank_all(query + 1);
    cache_.end();
  }

  /// Stores the kept set of every query, for callers that ask for it.
  __device__ void note_kept(std::uint32_t query) const {
    const ReplayShape& shape = at_.args.shape;
    __syncthreads();
    cache_.copy_live(at_.args.kept_bits + (at_.cache() * shape.tokens + query) * shape.words(),
                     query + 1, 0);
    __syncthreads();
  }

  /// Queries of this age or older have weight 0 (kvlab_observe_args::tail).
  __device__ std::uint32_t tail() const {
    if constexpr (P::kInfo.weighted) return P::tail(cache_.params());
    return kNoTail;
  }
  __device__ float weight(std::uint32_t age) const {
    if constexpr (P::kInfo.weighted) return P::weight(age, cache_.params());
    return 1.0f;
  }

  // Attending.

  /// Attends with query i of the block. `index`: the query's number among the measured queries, or
  /// -1. `folded` is a component of the totals: lane l of each warp has component l, which is head
  /// l % kHeads of part l / kHeads (ReplayTotals::fold()).
  __device__ void look(int i, std::uint32_t query, std::uint32_t age, int index, bool observes) {
    const ReplayWalkArgs& args = at_.args;
    const bool measures = index >= 0 && args.sums,
               stores = index >= 0 && index % args.sets.every == 0,
               attends = !kOther || observes || stores;
    direct_ = nullptr;
    all_direct_ = false;
    row_ = args.rows.e + at_.row(i) * kHeadGroups * args.shape.tokens;
    Totals totals{};
    if constexpr (kOther)
      if (measures) total_full(totals, i, query);  // row_ is the full row until here
    row_ = cache_.tokens().template row<kHeadGroups>(i);
    if (Tokens::kCachePositions && attends) {
      direct_ = at_.direct(i);
      cache_.tokens().template attend<kHeadGroups>(i, cache_.live(),
                                                   kObserves && cache_.now().tokens == 1);
    }
    if (attends) total(totals, query, !kOther && measures ? i : -1);
    float folded = fold(totals);
    if (measures) measure(i, query, folded);
    if (measures && args.measured.named_count)
      add_named_sums<kHeadGroups>(args, at_.task, at_.cache(), cache_.live_words(), i);
    if (!attends) return;
    const bool lost = is_lost(folded, args.shape);
    if (lost) {
      take_direct(totals, i, query, cache_.copies());
      folded = fold(totals);
    }
    if (observes) observe(folded, query, age);
    if (stores) store_kept(i, index, query, folded, lost);
    if constexpr (kTiered)
      if (stores && at_.rule.fp16_copy >= 0) store_fp16_copy(totals, i, index, query, folded);
  }

  /// Loads the exponentials of a strip that begins with this thread's slot `first`. Slots that hold
  /// no token at a position up to `query` get zeros. `kFull`: loads those of the full row, even if
  /// the cache's differ.
  template <bool kFull>
  __device__ void take(Strip& strip, std::uint32_t first, std::uint32_t query) const {
    const std::int64_t tokens = at_.args.shape.tokens;
#pragma unroll
    for (int k = 0; k < kStrip; ++k) {
      const std::uint32_t slot = first + k * kWarpSize;
      strip.e[k] = {};
      if (!cache_.holds(slot, query, visible_)) continue;
      const float4* const row = row_ + (kFull ? 0 : cache_.copies().row_of(slot));
#pragma unroll
      for (int head_group = 0; head_group < kHeadGroups; ++head_group)
        strip.e[k].head_group[head_group] = row[head_group * tokens + cache_.position(slot)];
    }
    if constexpr (!kFull)
      if (Tokens::kCachePositions || all_direct_) add_direct(strip, first, query);
  }
  /// Adds the exponentials that the row does not contain.
  __device__ void add_direct(Strip& strip, std::uint32_t first, std::uint32_t query) const {
#pragma unroll
    for (int k = 0; k < kStrip; ++k) {
      const std::uint32_t slot = first + k * kWarpSize;
      if (!cache_.holds(slot, query, visible_) || !(cache_.tokens().is_direct(slot) || all_direct_))
        continue;
#pragma unroll
      for (int head_group = 0; head_group < kHeadGroups; ++head_group)
        strip.e[k].head_group[head_group] = direct_[head_group * at_.args.slots.task_stride + slot];
    }
  }
  /// Calls each(strip, first slot of this thread in it) for each of the warp's strips.
  template <bool kFull = false, class Each>
  __device__ void for_strips(std::uint32_t query, Each each) const {
    for (std::uint32_t first = at_.first_slot_of_thread<kStrip>(); first - at_.lane < visible_;
         first += kStrip * at_.threads) {
      Strip strip;
      take<kFull>(strip, first, query);
      each(strip, first);
    }
  }

  /// Sums the exponentials. Also counts hits for query `i` of the block, unless i is -1.
  __device__ void total(Totals& totals, std::uint32_t query, int i) {
    totals.part[0] = {};
    if (kNeedsRequests) totals.part[kMaxPart] = {};
    ReplayHits<kHeadGroups> hits(at_.args.rows.request_threshold +
                                 at_.row(max(i, 0)) * kHeadGroups);
    for_strips(query, [&](const Strip& strip, std::uint32_t) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        totals.add_own(strip.e[k]);
        if (i >= 0) hits.count(strip.e[k]);
      }
    });
    if (i >= 0) hits.add_to(shared_.hits[i], at_.lane);
  }
  /// Computes the sum and hits of the live tokens in the full row, if the cache's exponentials
  /// differ from those.
  __device__ void total_full(Totals& totals, int i, std::uint32_t query) {
    ReplayHits<kHeadGroups> hits(at_.args.rows.request_threshold + at_.row(i) * kHeadGroups);
    for_strips<true>(query, [&](const Strip& strip, std::uint32_t) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
#pragma unroll
        for (int head_group = 0; head_group < kHeadGroups; ++head_group)
          add(totals.part[kFullPart].head_group[head_group], strip.e[k].head_group[head_group]);
        hits.count(strip.e[k]);
      }
    });
    hits.add_to(shared_.hits[i], at_.lane);
  }

  /// Alternates between two buffers, so that one barrier for each call is enough.
  __device__ float fold(const Totals& totals) {
    parity_ ^= 1;
    return totals.fold(shared_.folded[parity_], at_);
  }

  /// Keeps the numbers from which store_counts() computes recall and misses after the block.
  __device__ void measure(int i, std::uint32_t query, float folded) {
    const float kept = __shfl_sync(~0u, folded, kFullPart * kHeads + at_.lane % kHeads);
    if (at_.thread == 0) shared_.visible[i] = visible_;
    if (at_.thread < kHeads) shared_.kept[i][at_.thread] = kept;
  }

  /// Computes the direct exponentials of all visible tokens, and totals them instead of the rows'.
  template <class Copies>
  __device__ void take_direct(Totals& totals, int i, std::uint32_t query, const Copies& copies) {
    __syncthreads();
    take_direct_row(at_.args,
                    {cache_.positions(), cache_.tokens().positions_in_cache(), visible_, query,
                     at_.task, at_.direct(i)},
                    copies, &shared_.scratch[0][0]);
    direct_ = at_.direct(i);
    all_direct_ = true;
    total(totals, query, -1);
  }

  // Observing and ranking.

  /// Applies the observation of one query. If the append has only this query, updates the states
  /// and ranks the tokens. Otherwise adds the observation to those of the append's earlier queries.
  __device__ void observe(float folded, std::uint32_t query, std::uint32_t age) {
    if constexpr (kObserves) {
      const float max_exponential = __shfl_sync(~0u, folded, kMaxPart * kHeads + at_.lane % kHeads);
      const Look seen_by(folded, max_exponential, at_, weight(age), query);
      if (cache_.now().tokens > 1)
        note_seen(seen_by, query);
      else
        observe_alone(seen_by, query);
    }
  }
  /// Adds the query's observation to `seen`, which observe_all() passes to the policy.
  __device__ void note_seen(const Look& seen_by, std::uint32_t query) {
    for_strips(query, [&](const Strip& strip, std::uint32_t first) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        if (!cache_.holds(slot, query, visible_)) continue;
        const Observation seen = seen_by.observation(strip.e[k]);
        Observation& all = at_.args.slots.seen[at_.first_slot + slot];
        all.mass += seen.mass;
        all.requests += seen.requests;
        if (seen.requests) all.last_request = query;
      }
    });
  }
  /// Applies the observation of a query that is alone in its append, and chooses the next victim.
  /// Also writes to empty slots. This is harmless, because append() sets the whole state, and an
  /// empty slot is never chosen, because its position is protected.
  __device__ void observe_alone(const Look& seen_by, std::uint32_t query) {
    const Step attended = cache_.step_at(query, 1), ranking = cache_.step_at(query + 1, 0);
    const bool ranks = !kTiered && cache_.ranks_next();
    const std::uint32_t unprotected = ranks ? cache_.num_unprotected(query + 1) : 0;
    EvictionCandidate candidate = EvictionCandidate::none_unprotected();
    for_strips(query, [&](const Strip& strip, std::uint32_t first) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        if (!Tokens::kInShared && !cache_.holds(slot, query, visible_)) continue;
        auto own = cache_.state(slot);
        P::observe(own, seen_by.observation(strip.e[k]), cache_.params(), attended);
        cache_.put(slot, own);
        cache_.rank(candidate, slot, own, ranking, unprotected);
      }
    });
    if (ranks) cache_.choose(candidate);
  }

  /// Applies the observations of an append of several queries.
  __device__ void observe_all(const ReplayAppend& now) {
    if constexpr (kObserves) {
      const Step attended = cache_.step_at(now.first, now.tokens);
      const std::uint32_t older = cache_.live() - now.tokens;
      at_.for_slots<kStrip>(cache_.live(), [&](std::uint32_t i) {
        Observation seen = at_.args.slots.seen[at_.first_slot + i];
        seen.queries = i < older ? now.tokens : now.tokens - (i - older);
        auto own = cache_.state(i);
        P::observe(own, seen, cache_.params(), attended);
        cache_.put(i, own);
      });
    }
  }

  /// Chooses the victim of the next append, or the tokens to demote, if ranks_next(). Otherwise the
  /// next append chooses its victims itself (cache_.begin()).
  __device__ void rank_all(std::uint32_t now) {
    if (!cache_.ranks_next()) return;
    if constexpr (kTiered) {
      cache_.demote(now);
    } else {
      const Step ranking = cache_.step_at(now, 0);
      const std::uint32_t unprotected = cache_.num_unprotected(now);
      EvictionCandidate first = EvictionCandidate::none_unprotected();
      at_.for_slots<kStrip>(cache_.live(), [&](std::uint32_t i) {
        cache_.rank(first, i, cache_.state(i), ranking, unprotected);
      });
      cache_.choose(first);
    }
  }

  // Functions that store the inputs of replay_outputs() and replay_changes().

  /// Stores the bits of the kept tokens whose exponentials are in a row. The tokens before position
  /// `direct_end` have direct exponentials, so their products with values and terms are stored.
  __device__ void store_kept(int i, int index, std::uint32_t query, float folded, bool lost) {
    const ReplayKeptSets& sets = at_.args.sets;
    const std::int64_t kept = sets.kept_of(at_.cache(), index);
    const std::uint32_t direct_end = lost ? query + 1 : cache_.tokens().evicted_end();
    __syncthreads();
    if (!kTiered || direct_end > 0)
      cache_.copy_live(sets.shared + kept * at_.args.shape.words(), query + 1, direct_end);
    if constexpr (kTiered) store_quantized_tokens(kept, query + 1, direct_end);
    const bool whole =
        visible_ == query + 1 && !Tokens::kCachePositions && (!kTiered || at_.rule.copies <= 1);
    store_kept_sums(kept, folded, whole, direct_end > 0);
    if (direct_end > 0) store_direct(at_.cache(), i, index, direct_end, cache_.copies());
    __syncthreads();
  }
  /// `whole`: all tokens are kept, exact, and at original positions, so outputs have no error.
  __device__ void store_kept_sums(std::int64_t kept, float folded, bool whole, bool direct) const {
    ReplayKept& to = at_.args.sets.kept[kept];
    if (at_.thread < kHeads) to.sums[at_.thread] = folded;
    if (at_.thread == 0) to.whole = whole, to.direct = direct;
  }

  /// Stores the bits of each copy's tokens. Tokens on tiers have direct exponentials either all or
  /// not at all; if all, stores zeros.
  __device__ void store_quantized_tokens(std::int64_t kept, std::uint32_t tokens,
                                         std::uint32_t direct_end) const {
    const ReplayTierArgs& args = static_cast<const ReplayTierArgs&>(at_.args);
    const ReplayKeptSets& sets = args.sets;
    const int words = args.shape.words();
    if (direct_end == 0) cache_.copy_words(0, sets.shared + kept * words, tokens);
    for (int copy = 1; copy <= args.copies.count; ++copy) {
      if (!(at_.rule.copies >> copy & 1)) continue;
      std::uint32_t* const to = sets.quantized + (kept * args.copies.count + copy - 1) * words;
      if (direct_end == 0)
        cache_.copy_words(copy, to, tokens);
      else
        cache_.copy_live(to, tokens, direct_end);
    }
  }
  /// Stores the kept set and the sums of the fp16 copy. It keeps the same tokens, in 16 bits.
  __device__ void store_fp16_copy(Totals& totals, int i, int index, std::uint32_t query,
                                  float folded) {
    const ReplayKeptSets& sets = at_.args.sets;
    const std::int64_t cache = at_.args.sweep.cache_of(at_.task, at_.rule.fp16_copy),
                       kept = sets.kept_of(cache, index);
    float exact = __shfl_sync(~0u, folded, kFullPart * kHeads + at_.lane % kHeads);
    const bool lost = is_lost(exact, at_.args.shape);
    if (lost) {
      take_direct(totals, i, query, ExactCopies{});
      exact = fold(totals);
    }
    const std::uint32_t direct_end = lost ? query + 1 : 0;
    cache_.copy_live(sets.shared + kept * at_.args.shape.words(), query + 1, direct_end);
    store_kept_sums(kept, exact, visible_ == query + 1, lost);
    if (lost) store_direct(cache, i, index, direct_end, ExactCopies{});
    __syncthreads();
  }

  /// Stores the sums of direct exponentials times values, and times terms, over the tokens before
  /// position `end`.
  template <class Copies>
  __device__ void store_direct(std::int64_t cache, int i, int index, std::uint32_t end,
                               const Copies& copies) {
    const ReplayWalkArgs& args = at_.args;
    const ReplayKeptSets& sets = args.sets;
    const DirectValues values{cache_.positions(), visible_, end, at_.task, at_.direct(i)};
    if (args.terms.gradient_samples) {
      const QueryTerms terms(args.shape, args.terms, at_.task, index);
      sum_direct_terms(args, values, terms, copies,
                       sets.changes + sets.kept_of(cache, index) * terms.columns);
    }
    if (!args.measured.samples(index)) return;
    cache_.tokens().template sum_values<kHeadGroups>(
        values, copies,
        sets.values +
            sets.sample_of(args.measured, cache, index) * args.shape.group * args.shape.head_size);
  }

  const CacheThread& at_;
  ReplayShared& shared_;
  Cache cache_;
  int parity_ = 0;  ///< the buffer that fold() used last
  // The next members belong to the current query.
  std::uint32_t visible_ = 0;  ///< number of live tokens that it sees, which are in the first slots
  const float4* row_ = nullptr;  // [head group, token]: its row
  /// [head group, slot]: used for tokens whose exponentials are not in the row.
  const float4* direct_ = nullptr;
  bool all_direct_ = false;  ///< whether these are all visible tokens
};

/// Uses one thread block for each member (x) and each of its head tasks (y).
template <class P, int kHeadGroups, bool kLargest, class Tokens>
__global__ void __launch_bounds__(replay_max_threads(Tokens::kCachePositions),
                                  replay_blocks(Tokens::kCachePositions))
    walk_caches(const __grid_constant__ typename Tokens::Args args) {
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ ReplayShared shared;
  const CacheThread at(args);
  ReplayWalk<P, kHeadGroups, kLargest, Tokens>(at, shared, dynamic).walk();
}

}  // namespace kvlab::kernels
