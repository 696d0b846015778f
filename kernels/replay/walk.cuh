// One policy's caches through a block of queries: a thread block for each cache (unit and
// configuration), which takes the queries in order.
//
// Bytes: for each live token and query 16 a quad, its exponentials (from the L2 cache: the caches
// of a unit read the same rows). States stay in shared memory through the block, where they fit.
#pragma once

#include "kernels/replay/cache.cuh"
#include "kernels/replay/figures.cuh"
#include "kernels/replay/observe.cuh"
#include "kernels/replay/old_keys.cuh"
#include "kernels/replay/totals.cuh"

namespace kvlab::kernels {

/// T: of keys and values. kLargest: as QueryLook's. kRungs: of ladders, never squeezed.
template <class P, int kQuads, bool kSqueezed, bool kInRoom, class T, bool kLargest, bool kRungs>
class ReplayWalk {
  using Cache = ReplayCache<P, kSqueezed, kInRoom, kRungs>;
  using Exponentials = Quads<kQuads>;
  using Look = QueryLook<P, kQuads, kLargest>;
  static constexpr bool kObserves = P::kInfo.needs != Needs::nothing;
  static constexpr bool kAsks = needs_requests(P::kInfo.needs);
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kStrip = replay_strip(kSqueezed);

  /// A cache's exponentials are not the full row's.
  static constexpr bool kOther = kSqueezed || kRungs;
  using Totals = ReplayTotals<kQuads, kOther, kAsks>;
  static constexpr int kFullPart = Totals::kFullPart, kMostPart = Totals::kMostPart;
  struct Strip {
    Exponentials e[kStrip];
  };

 public:
  __device__ ReplayWalk(const ReplayPlace& at, ReplayShared& shared, std::uint32_t* live_words,
                        std::byte* room)
      : at_(at),
        shared_(shared),
        stage_(at.args, at.unit, room),
        cache_(at, shared, live_words, room + room_of_old_keys(at.args)) {
    for (std::uint32_t n = at.thread; n < kMostReplayQueries * kMostReplayGroup; n += at.threads)
      (&shared.hits[0][0])[n] = 0;
    if (at.thread == 0) shared.listed = 0;
    __syncthreads();
  }

  __device__ void run() {
    for (int i = 0; i < at_.args.rows.count; ++i) step(i);
    __syncthreads();
    if (at_.args.figures.sums) RecallSums(at_, shared_).add();
    cache_.move_out();
  }

 private:
  __device__ void step(int i) {
    const ReplayArgs& args = at_.args;
    const std::uint32_t query = args.rows.first + i;
    const ReplayAdmission now = cache_.now();
    if (query == now.first) cache_.begin();
    const std::uint32_t age = now.first + now.tokens - 1 - query;
    visible_ = cache_.live() - age;
    const int index = args.span.index[query];
    const bool observes = kObserves && (kAsks || age < tail());
    if (observes || index >= 0) look(i, query, age, index, observes);
    if (args.figures.kept) note_kept(query);
    if (age > 0) return;
    if (now.tokens > 1) observe_all(now);
    if (kRungs || !kObserves || now.tokens > 1 || !observes) rank_all(query + 1);
    cache_.end();
  }

  __device__ void note_kept(std::uint32_t query) const {
    const ReplayFigures& figures = at_.args.figures;
    __syncthreads();
    cache_.copy_live(figures.kept + (at_.figure() * at_.args.shape.tokens + query) * figures.words,
                     query + 1, 0);
    __syncthreads();
  }

  __device__ std::uint32_t tail() const {
    if constexpr (P::kInfo.weighted) return P::tail(cache_.params());
    return kNoTail;
  }
  __device__ float weight(std::uint32_t age) const {
    if constexpr (P::kInfo.weighted) return P::weight(age, cache_.params());
    return 1.0f;
  }

  // Attending.

  __device__ void look(int i, std::uint32_t query, std::uint32_t age, int index, bool observes) {
    const ReplayArgs& args = at_.args;
    const bool measures = index >= 0 && args.figures.sums,
               leaves = index >= 0 && index % args.samples.kept_every == 0,
               attends = !kOther || observes || leaves;
    const std::int64_t row = at_.row(i) * kQuads * args.shape.tokens;
    own_ = nullptr;
    all_own_ = false;
    shared_row_ = args.rows.e + row;
    Totals totals{};
    if constexpr (kOther)
      if (measures) total_full(totals, i, query);
    if constexpr (kSqueezed) {
      shared_row_ = args.rows.squeezed + row;
      if (attends) {
        own_ = at_.own(i);
        attend_old(i, kObserves && cache_.now().tokens == 1);
      }
    }
    if (attends) total(totals, query, !kOther && measures ? i : -1);
    float folded = fold(totals);
    if (measures) measure(i, query, folded);
    if (measures && args.span.named_count) add_named_sums<kQuads>(at_, cache_.live_words(), i);
    if (!attends) return;
    const bool lost = is_lost(folded, at_);
    if (lost) {
      take_own(totals, i, query, copies());
      folded = fold(totals);
    }
    if (observes) observe(folded, query, age);
    if (leaves) leave_kept(i, index, query, folded, lost);
    if constexpr (kRungs)
      if (leaves && at_.rule.twin >= 0) leave_twin(totals, i, index, query, folded);
  }

  /// The exponentials of the old tokens for query i of the block: those that are not known yet, and
  /// with `ahead` for the queries after it too, up to the end of their run.
  __device__ void attend_old(int i, bool ahead) {
    ReplayRange range = ahead && i % kReplayAhead != 0 ? cache_.moved() : ReplayRange::all();
    cache_.set_moved(ahead ? ReplayRange::none() : ReplayRange::all());
    range.end = min(range.end, cache_.first_young());
    if (range.empty()) return;
    const int end = ahead ? min((i / kReplayAhead + 1) * kReplayAhead, at_.args.rows.count) : i + 1;
    const int run = i / kReplayAhead, first = run * kReplayAhead;
    stage_.take(run);
    const ListedSlots old =
        cache_.list(range, static_cast<std::uint32_t>(at_.args.rows.first + i),
                    static_cast<std::uint32_t>(i - first), static_cast<std::uint32_t>(end - first));
    take_old_keys<kQuads, T>(at_.args, at_.unit, at_.rule.first_slot, stage_, old);
    __syncthreads();
    if (at_.thread == 0) shared_.listed = 0;
  }

  /// Of a strip from this thread's slot `first` on: zeros where a slot has no token up to `query`.
  /// `full`: of the full row, where that is another.
  template <bool kFull>
  __device__ void take(Strip& strip, std::uint32_t first, std::uint32_t query) const {
    const std::int64_t tokens = at_.args.shape.tokens;
#pragma unroll
    for (int k = 0; k < kStrip; ++k) {
      const std::uint32_t slot = first + k * kWarpSize;
      strip.e[k] = {};
      if (!cache_.holds(slot, query, visible_)) continue;
      const float4* const row = shared_row_ + (kFull ? 0 : copies()(slot) * at_.args.copies.rows);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        strip.e[k].quad[quad] = row[quad * tokens + cache_.position(slot)];
    }
    if constexpr (!kFull)
      if (kSqueezed || all_own_) take_private(strip, first, query);
  }
  /// What the shared row does not have.
  __device__ void take_private(Strip& strip, std::uint32_t first, std::uint32_t query) const {
#pragma unroll
    for (int k = 0; k < kStrip; ++k) {
      const std::uint32_t slot = first + k * kWarpSize;
      if (!cache_.holds(slot, query, visible_) || !(cache_.is_old(slot) || all_own_)) continue;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        strip.e[k].quad[quad] = own_[quad * at_.args.caches.unit_slots + slot];
    }
  }
  /// Calls each(strip, its first slot of this thread) for each of the warp's strips.
  template <bool kFull = false, class Each>
  __device__ void for_strips(std::uint32_t query, Each each) const {
    for (std::uint32_t first = at_.first_slot_of_thread<kStrip>(); first - at_.lane < visible_;
         first += kStrip * at_.threads) {
      Strip strip;
      take<kFull>(strip, first, query);
      each(strip, first);
    }
  }

  /// Counts hits for query `i` of the block, if that is not -1.
  __device__ void total(Totals& totals, std::uint32_t query, int i) {
    totals.part[0] = {};
    if (kAsks) totals.part[kMostPart] = {};
    ReplayHits<kQuads> hits(at_.args.rows.least + at_.row(max(i, 0)) * kQuads);
    for_strips(query, [&](const Strip& strip, std::uint32_t) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        totals.add_own(strip.e[k]);
        if (i >= 0) hits.count(strip.e[k]);
      }
    });
    if (i >= 0) hits.add_to(shared_.hits[i], at_.lane);
  }
  /// The full row's sum and hits, where the cache's own differ.
  __device__ void total_full(Totals& totals, int i, std::uint32_t query) {
    ReplayHits<kQuads> hits(at_.args.rows.least + at_.row(i) * kQuads);
    for_strips<true>(query, [&](const Strip& strip, std::uint32_t) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          add(totals.part[kFullPart].quad[quad], strip.e[k].quad[quad]);
        hits.count(strip.e[k]);
      }
    });
    hits.add_to(shared_.hits[i], at_.lane);
  }

  __device__ float fold(const Totals& totals) {
    parity_ ^= 1;
    return totals.fold(shared_.folded[parity_], at_);
  }

  __device__ void measure(int i, std::uint32_t query, float folded) {
    const float kept = __shfl_sync(~0u, folded, kFullPart * kHeads + at_.lane % kHeads);
    if (at_.thread == 0) shared_.visible[i] = visible_;
    if (at_.thread < kHeads) shared_.kept[i][at_.thread] = visible_ == query + 1 ? -1.0f : kept;
  }

  __device__ OwnRow own_row(int i, std::uint32_t query) const {
    return {cache_.positions(), kSqueezed ? cache_.places() : nullptr, visible_, query, at_.unit,
            at_.own(i)};
  }
  /// Which copies the tokens are of.
  __device__ auto copies() const {
    if constexpr (kRungs)
      return cache_.copies();
    else
      return ExactCopies{};
  }
  template <class Copies>
  __device__ void take_own(Totals& totals, int i, std::uint32_t query, const Copies& copies) {
    __syncthreads();
    take_own_row(at_.args, own_row(i, query), copies, &shared_.scratch[0][0]);
    own_ = at_.own(i);
    all_own_ = true;
    total(totals, query, -1);
  }

  // Observing and ranking.

  /// What one query shows: to the states at once where it is alone in its admission, which is
  /// ranked then too.
  __device__ void observe(float folded, std::uint32_t query, std::uint32_t age) {
    if constexpr (kObserves) {
      const float most = __shfl_sync(~0u, folded, kMostPart * kHeads + at_.lane % kHeads);
      const Look seen_by(folded, most, at_, weight(age), query);
      if (cache_.now().tokens > 1)
        note_seen(seen_by, query);
      else
        observe_alone(seen_by, query);
    }
  }
  __device__ void note_seen(const Look& seen_by, std::uint32_t query) {
    for_strips(query, [&](const Strip& strip, std::uint32_t first) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        if (!cache_.holds(slot, query, visible_)) continue;
        const Observation seen = seen_by.seen(strip.e[k]);
        Observation& all = at_.args.caches.seen[at_.first_slot + slot];
        all.mass += seen.mass;
        all.requests += seen.requests;
        if (seen.requests) all.last_request = query;
      }
    });
  }
  /// What happens in a slot without a token is of no account: admit() sets all of a state, and its
  /// position is guarded.
  __device__ void observe_alone(const Look& seen_by, std::uint32_t query) {
    const Step attended = cache_.step_at(query, 1), leaves = cache_.step_at(query + 1, 0);
    const bool ranks = !kRungs && cache_.ranks_next();
    const std::uint32_t unguarded = ranks ? cache_.unguarded(query + 1) : 0;
    Candidate candidate;
    for_strips(query, [&](const Strip& strip, std::uint32_t first) {
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        if (!kInRoom && !cache_.holds(slot, query, visible_)) continue;
        auto own = cache_.state(slot);
        P::observe(own, seen_by.seen(strip.e[k]), cache_.params(), attended);
        cache_.put(slot, own);
        cache_.rank(candidate, slot, own, leaves, unguarded);
      }
    });
    if (ranks) cache_.choose(candidate);
  }

  /// After an admission of several queries.
  __device__ void observe_all(const ReplayAdmission& now) {
    if constexpr (kObserves) {
      const Step attended = cache_.step_at(now.first, now.tokens);
      const std::uint32_t older = cache_.live() - now.tokens;
      at_.for_slots<kStrip>(cache_.live(), [&](std::uint32_t i) {
        Observation seen = at_.args.caches.seen[at_.first_slot + i];
        seen.queries = i < older ? now.tokens : now.tokens - (i - older);
        auto own = cache_.state(i);
        P::observe(own, seen, cache_.params(), attended);
        cache_.put(i, own);
      });
    }
  }

  __device__ void rank_all(std::uint32_t now) {
    if (!cache_.ranks_next()) return;
    if constexpr (kRungs) {
      cache_.step_down(now);
    } else {
      const Step leaves = cache_.step_at(now, 0);
      const std::uint32_t unguarded = cache_.unguarded(now);
      Candidate first;
      at_.for_slots<kStrip>(cache_.live(), [&](std::uint32_t i) {
        cache_.rank(first, i, cache_.state(i), leaves, unguarded);
      });
      cache_.choose(first);
    }
  }

  /// What replay_outputs() and replay_changes() take the query's from.
  __device__ void leave_kept(int i, int index, std::uint32_t query, float folded, bool lost) {
    const ReplaySamples& samples = at_.args.samples;
    const std::int64_t kept = at_.args.kept_of(at_.figure(), index);
    const std::uint32_t own = lost ? query + 1 : cache_.first_young();
    __syncthreads();
    if (!kRungs || own > 0) cache_.copy_live(samples.shared + kept * samples.words, query + 1, own);
    if constexpr (kRungs) leave_coded(kept, query + 1, own);
    if (at_.thread < kHeads) samples.samples[kept].sums[at_.thread] = folded;
    if (at_.thread == 0) {
      samples.samples[kept].whole =
          visible_ == query + 1 && !kSqueezed && (!kRungs || at_.rule.copies <= 1);
      samples.samples[kept].own = own > 0;
    }
    if (own > 0) leave_own(at_.figure(), i, index, own, copies());
    __syncthreads();
  }

  /// The tokens of each copy, none where all are the cache's own.
  __device__ void leave_coded(std::int64_t kept, std::uint32_t tokens, std::uint32_t own) const {
    const ReplaySamples& samples = at_.args.samples;
    if (own == 0) cache_.copy_words(0, samples.shared + kept * samples.words, tokens);
    for (int copy = 1; copy <= at_.args.copies.count; ++copy) {
      if (!(at_.rule.copies >> copy & 1)) continue;
      std::uint32_t* const to =
          samples.coded + (kept * at_.args.copies.count + copy - 1) * samples.words;
      if (own == 0)
        cache_.copy_words(copy, to, tokens);
      else
        cache_.copy_live(to, tokens, own);
    }
  }
  /// The same tokens in 16 bit.
  __device__ void leave_twin(Totals& totals, int i, int index, std::uint32_t query, float folded) {
    const ReplaySamples& samples = at_.args.samples;
    const std::int64_t figure = at_.args.figure_of(at_.unit, at_.rule.twin),
                       kept = at_.args.kept_of(figure, index);
    float exact = __shfl_sync(~0u, folded, kFullPart * kHeads + at_.lane % kHeads);
    const bool lost = is_lost(exact, at_);
    if (lost) {
      take_own(totals, i, query, ExactCopies{});
      exact = fold(totals);
    }
    const std::uint32_t own = lost ? query + 1 : 0;
    cache_.copy_live(samples.shared + kept * samples.words, query + 1, own);
    if (at_.thread < kHeads) samples.samples[kept].sums[at_.thread] = exact;
    if (at_.thread == 0)
      samples.samples[kept].whole = visible_ == query + 1, samples.samples[kept].own = lost;
    if (lost) leave_own(figure, i, index, own, ExactCopies{});
    __syncthreads();
  }

  /// The part of a query's outputs and changes that is the tokens' before position `own`.
  template <class Copies>
  __device__ void leave_own(std::int64_t figure, int i, int index, std::uint32_t own,
                            const Copies& of_copies) {
    const ReplayArgs& args = at_.args;
    const OwnValues of{cache_.positions(), visible_, own, at_.unit, at_.own(i)};
    if (args.samples.draws) {
      const QueryTerms terms(args, at_.unit, index);
      sum_own_terms(args, of, terms, of_copies,
                    args.samples.own_changes + args.kept_of(figure, index) * terms.columns);
    }
    if (index % args.span.sample_every != 0) return;
    float* const to =
        args.samples.own + args.sample_of(figure, index) * args.shape.group * args.shape.head_size;
    if constexpr (kRungs)
      sum_coded_values(args, of, of_copies, to);
    else
      sum_own_values<kQuads, FourBits<T>>(args, of, shared_.scratch, to);
  }

  const ReplayPlace& at_;
  ReplayShared& shared_;
  OldKeyStage stage_;
  Cache cache_;
  int parity_ = 0;
  std::uint32_t visible_ = 0;
  const float4* shared_row_ = nullptr;  // [quad, token]: of the query
  const float4* own_ = nullptr;         // [quad, slot]: where the shared row is of no use
  bool all_own_ = false;
};

/// A block for each member (x) and unit of it (y).
template <class P, int kQuads, bool kSqueezed, bool kInRoom, class T, bool kLargest, bool kRungs>
__global__ void __launch_bounds__(replay_most_threads(kSqueezed), replay_blocks(kSqueezed))
    walk_caches(const __grid_constant__ ReplayArgs args) {
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ ReplayShared shared;
  const ReplayPlace at(args);
  std::byte* const room = dynamic + bytes_of_words(args) * (kRungs ? 1 + args.most_rungs : 1);
  ReplayWalk<P, kQuads, kSqueezed, kInRoom, T, kLargest, kRungs>(
      at, shared, reinterpret_cast<std::uint32_t*>(dynamic), room)
      .run();
}

}  // namespace kvlab::kernels
