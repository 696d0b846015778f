// A run: queries that each admit one token, taken together.
//
// A policy that is `rising` never ranks a token lower than before. So the tokens of the least ranks
// at the start of a run hold its victims, for as long as the first of them comes before the first
// of all others as it was then. These candidates and the tokens that enter have a thread each.
//
// A few queries at a time, their victims are foretold from the ranks as they are. Then everything
// can be taken for these queries at once: exponentials, where positions are squeezed; sums; and
// what each candidate is shown, up to the first query before which another would have left. Up to
// there all is as it should be, and from there it goes on: the first victim is always right.
//
// Slots are in the order of age at the end of a run, so that neighbours read neighbours. Bytes: for
// each live token and query 16 a quad, twice, from the L2 cache.
#pragma once

#include "kernels/replay/cache.cuh"
#include "kernels/replay/observe.cuh"
#include "kernels/replay/own.cuh"
#include "kernels/replay/totals.cuh"

namespace kvlab::kernels {

template <class P, int kQuads, bool kSqueezed, bool kInRoom>
class ReplayRun {
  using Cache = ReplayCache<P, kSqueezed, kInRoom>;
  using Slot = typename P::Slot;
  using Exponentials = Quads<kQuads>;
  using Look = QueryLook<P, kQuads>;
  static constexpr bool kAsks = P::kInfo.needs == Needs::requests;
  using Totals = ReplayTotals<kQuads, false, kAsks>;
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kMostPart = Totals::kMostPart;
  static constexpr int kNever = ReplayRunShared::kNever;
  static constexpr int kAtOnce = 8 / kQuads;  ///< exponentials that a thread has on their way

 public:
  __device__ ReplayRun(const ReplayPlace& at, ReplayShared& shared, Cache& cache,
                       OldKeyStage& stage, std::uint32_t* words)
      : at_(at),
        shared_(shared),
        run_(shared.run),
        cache_(cache),
        stage_(stage),
        words_(words),
        row_(std::int64_t{kQuads} * at.args.shape.tokens),
        plane_(kQuads * at.args.caches.unit_slots),
        own_(at.own(0)) {}

  /// Takes queries from `first` of the block on, up to the first that has to be taken by itself;
  /// says how many. Calls seen(query of the block, index in the span, sums by head) after each.
  template <class Seen>
  __device__ int take(int first, Seen seen) {
    const int count = count_from(first);
    if (count == 0) return 0;
    first_ = first, count_ = count;
    query_ = at_.args.rows.first + first;
    full_rows_ = at_.args.rows.e + at_.row(first) * row_;
    rows_ = kSqueezed ? at_.args.rows.squeezed + at_.row(first) * row_ : full_rows_;
    live_ = cache_.live();
    leaves_ = cache_.room() == 0;
    choose_candidates();
    choose_entrants();
    int from = 0;
    while (from < count_) {
      const int done = take_foretold(from, seen);
      if (done == from) break;
      from = done;
    }
    end(from);
    return from;
  }

 private:
  /// Takes some queries from `from` on; says up to which.
  template <class Seen>
  __device__ int take_foretold(int from, Seen seen) {
    const int planes = ((first_ + from) / kReplayAhead + 1) * kReplayAhead - first_;
    int to = foretell(from, min(count_, planes));
    if (to == from) return from;
    if constexpr (kSqueezed) to = attend_old(from, to);
    sum_up(from, to);
    __syncthreads();
    const int done = observe_own(from, to);
    forget_hits(done, to);
    observe_others(from, done);
    if (kSqueezed) close_up(from, done);
    __syncthreads();
    for (int j = from; j < done; ++j) {
      cache_.enter_alone(query_ + static_cast<std::uint32_t>(j), leaves_, run_.victims[of(j)].y);
      if (exit_ == j && slot_ < live_) cache_.leave_slot(slot_);
      seen(first_ + j, run_.index[of(j)], run_.sums[of(j)]);
    }
    __syncthreads();
    return done;
  }

  /// Threads for tokens that enter; the others have candidates.
  __device__ std::uint32_t entering() const {
    return min(at_.threads / 4, std::uint32_t{kMostReplayQueries});
  }
  __device__ std::uint32_t candidates() const { return at_.threads - entering(); }
  __device__ bool is_entrant() const { return at_.thread >= candidates(); }

  /// How many queries may be one run: all with victims, or all without.
  __device__ int count_from(int first) {
    if (cache_.now().first != at_.args.rows.first + first || !cache_.one_by_one()) return 0;
    std::uint32_t most = min(entering(), static_cast<std::uint32_t>(at_.args.rows.count - first));
    if (cache_.room() > 0) most = min(most, cache_.room());
    return static_cast<int>(cache_.single_admissions(most));
  }

  // Who may leave.

  __device__ void choose_candidates() {
    holds_ = false;
    outside_ = {};
    for (std::uint32_t w = at_.thread; w * kWarpSize < live_; w += at_.threads) words_[w] = 0;
    if (!leaves_) return;
    const std::uint32_t count = min(live_, candidates());
    if (live_ <= candidates()) {
      slot_ = at_.thread;
    } else {
      select_candidates(count);
      slot_ = run_.slots[at_.thread];
    }
    __syncthreads();
    if (at_.thread >= count) return;
    holds_ = true;
    position_ = cache_.position(slot_);
    state_ = cache_.state(slot_);
    atomicOr(words_ + slot_ / kWarpSize, 1u << slot_ % kWarpSize);
  }
  /// And where each thread's token is.
  __device__ void choose_entrants() {
    entry_ = -1;
    if (is_entrant()) {
      entry_ = static_cast<int>(at_.thread - candidates());
      slot_ = live_ + at_.thread - candidates();
      position_ = query_ + at_.thread - candidates();
    }
    run_.slots[at_.thread] = slot_;
    run_.positions[at_.thread] = position_;
    run_.entries[at_.thread] = is_entrant() || holds_ ? entry_ : kNever;
    run_.exits[at_.thread] = kNever;
  }

  /// The `count` slots of the least ranks among those that may leave by the run's end; the others'
  /// first remains outside.
  __device__ void select_candidates(std::uint32_t count) {
    const std::uint32_t last = query_ + static_cast<std::uint32_t>(count_) - 1;
    const Step leaves = cache_.step_at(query_, 0);
    std::uint64_t* const ranks = at_.args.caches.ranks + at_.first_slot;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < live_; i += at_.threads)
      ranks[i] = cache_.rank_of(cache_.state(i), cache_.position(i), leaves);
    __syncthreads();
    const LeavingKeys keys{ranks, cache_.positions(), cache_.guards(), last};
    const LeavingThreshold threshold = select_leaving(shared_.selection, keys, live_, count);
    const auto stays = [&](std::uint32_t i) { return !threshold.leaves(keys[i]); };
    const std::uint32_t unguarded = cache_.unguarded(last);
    Candidate least;
    number_stayers(shared_.selection, live_, stays,
                   [&](std::uint32_t i, bool stay, std::uint32_t before) {
                     if (!stay)
                       run_.slots[i - before] = i;
                     else if (cache_.may_leave(cache_.position(i), unguarded))
                       least.take({ranks[i], cache_.position(i), i});
                   });
    parity_ ^= 1;
    outside_ = block_first(least, shared_.first[parity_], at_);
  }

  __device__ bool is_candidate(std::uint32_t slot) const {
    return words_[slot / kWarpSize] >> slot % kWarpSize & 1;
  }

  /// Where what is shared of query j lies: as many as are taken together.
  __device__ static int of(int j) { return j % kReplayAhead; }

  // Exponentials.

  /// Of a token for query j: where it has lost a younger one, the cache's own.
  __device__ Exponentials fetch(int j, std::uint32_t slot, std::uint32_t position) const {
    const bool own = kSqueezed && position < run_.gone[of(j)];
    const float4* const shared_at = rows_ + j * row_ + position;
    const float4* const own_at = own_ + (first_ + j) % kReplayAhead * plane_ + slot;
    return fetch(own ? own_at : shared_at, own ? at_.args.caches.unit_slots : row_ / kQuads);
  }
  /// Of the full row.
  __device__ Exponentials fetch_full(int j, std::uint32_t position) const {
    return fetch(full_rows_ + j * row_ + position, row_ / kQuads);
  }
  __device__ static Exponentials fetch(const float4* first, std::int64_t of_quad) {
    Exponentials e;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) e.quad[quad] = first[quad * of_quad];
    return e;
  }

  /// What queries [from, to) attend to, if the victims are who they are foretold to be: a warp for
  /// each query.
  __device__ void sum_up(int from, int to) {
    for (int j = from + static_cast<int>(at_.warp); j < to; j += static_cast<int>(at_.warps)) {
      const int index = at_.args.span.index[query_ + static_cast<std::uint32_t>(j)];
      Sums sums(at_.args.rows.least + at_.row(first_ + j) * kQuads);
      add_tokens(sums, j, live_, [&](std::uint32_t slot, Where& token) {
        token = {slot, cache_.position(slot)};
        return !is_candidate(slot);
      });
      add_tokens(sums, j, at_.threads, [&](std::uint32_t t, Where& token) {
        token = {run_.slots[t], run_.positions[t]};
        return run_.entries[t] <= j && j < run_.exits[t];
      });
      finish(sums, j, index);
    }
  }
  struct Sums {
    Totals totals{};
    Exponentials full{};  ///< of the full row, where that is another
    ReplayHits<kQuads> hits;
    __device__ explicit Sums(const float4* least) : hits(least) {}
  };
  struct Where {
    std::uint32_t slot, position;
  };
  /// Those of tokens [0, end) for which pick() says so. All loads go before all sums.
  template <class Pick>
  __device__ void add_tokens(Sums& sums, int j, std::uint32_t end, Pick pick) const {
    for (std::uint32_t base = at_.lane; base - at_.lane < end; base += kAtOnce * kWarpSize) {
      Exponentials e[kAtOnce], full[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const std::uint32_t i = base + n * kWarpSize;
        Where token;
        e[n] = {}, full[n] = {};
        if (i >= end || !pick(i, token)) continue;
        e[n] = fetch(j, token.slot, token.position);
        if (kSqueezed) full[n] = fetch_full(j, token.position);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        sums.totals.add_own(e[n]);
        sums.hits.count(kSqueezed ? full[n] : e[n]);
        if (kSqueezed) add(sums.full, full[n]);
      }
    }
  }

  /// What a query's sums say: by its warp.
  __device__ void finish(const Sums& sums, int j, int index) {
    sums.totals.fold_warp(run_.sums[of(j)], at_);
    __syncwarp();
    const float folded = at_.lane < Totals::kParts * kHeads ? run_.sums[of(j)][at_.lane] : 0.0f,
                most = __shfl_sync(~0u, folded, kMostPart * kHeads + at_.lane % kHeads);
    const bool lost = is_lost(folded, at_);
    const Look look(folded, most, at_, 1.0f, query_ + static_cast<std::uint32_t>(j));
    if (at_.lane == 0) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) run_.looks[of(j)][quad] = look.each().quad[quad];
      run_.index[of(j)] = index;
      if (lost) atomicMin(&run_.right, j);
    }
    if (index >= 0) measure(sums, j, folded);
  }
  __device__ void measure(const Sums& sums, int j, float folded) {
    const int i = first_ + j;
    const std::uint32_t visible = live_ + (leaves_ ? 0 : static_cast<std::uint32_t>(j) + 1);
    const bool whole = visible == at_.args.rows.first + static_cast<std::uint32_t>(i) + 1;
    sums.hits.add_to(shared_.hits[i], at_.lane);
    if (at_.lane == 0) shared_.visible[i] = visible;
    if constexpr (kSqueezed) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float full = warp_fold4(sums.full.quad[quad], Add{});
        if (at_.lane < 4) shared_.kept[i][4 * quad + at_.lane] = whole ? -1.0f : full;
      }
    } else if (at_.lane < kHeads) {
      shared_.kept[i][at_.lane] = whole ? -1.0f : folded;
    }
  }
  /// Queries [from, to) are taken again.
  __device__ void forget_hits(int from, int to) {
    for (int j = from + static_cast<int>(at_.warp); j < to; j += static_cast<int>(at_.warps))
      if (at_.lane < kHeads) shared_.hits[first_ + j][at_.lane] = 0;
  }

  // What is foretold, and what comes of it.

  /// Who leaves before queries [from, to), by the ranks as they are. Says up to which: as far as a
  /// candidate is sure to be the first, if it is rightly foretold.
  __device__ int foretell(int from, int to) {
    exit_ = kNever;
    if (at_.thread == 0) run_.right = to;
    std::uint32_t gone = cache_.first_young();
    if (!leaves_) {
      for (int j = from + static_cast<int>(at_.thread); j < to; j += static_cast<int>(at_.threads))
        run_.victims[of(j)] = {~0u, 0}, run_.gone[of(j)] = gone;
      __syncthreads();
      return to;
    }
    list_first(query_ + static_cast<std::uint32_t>(to) - 1);
    __syncthreads();
    if (at_.warp == 0) {
      const int told = order_first(from, to, gone);
      if (at_.lane == 0) run_.told = told;
    }
    __syncthreads();
    to = run_.told;
    for (int j = from; j < to; ++j)
      if (holds_ && run_.victims[of(j)].x == slot_) exit_ = j;
    if (exit_ != kNever) run_.exits[at_.thread] = exit_;
    __syncthreads();
    return to;
  }
  /// The first of each warp's tokens that may leave by `last`, to run.firsts.
  __device__ void list_first(std::uint32_t last) {
    Candidate mine;
    if (holds_ && cache_.may_leave(position_, cache_.unguarded(last)))
      mine = {cache_.rank_of(state_, position_, cache_.step_at(query_, 0)), position_, slot_};
    Candidate own;
    for (unsigned n = 0; n < kReplayAhead; ++n) {
      const Candidate first = warp_first(mine);
      if (at_.lane == n) own = first;
      if (first.slot == mine.slot && first.position == mine.position) mine = {};
    }
    if (at_.lane < kReplayAhead) run_.firsts[at_.warp][at_.lane] = packed(own);
  }
  /// From those, who leaves before each query: by a warp.
  __device__ int order_first(int from, int to, std::uint32_t gone) {
    constexpr int kOwn = kReplayWarps * kReplayAhead / kWarpSize;
    Candidate own[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const std::uint32_t which = n * kWarpSize + at_.lane;
      if (which < at_.warps * kReplayAhead) own[n] = unpacked((&run_.firsts[0][0])[which]);
    }
    for (int j = from; j < to; ++j) {
      const std::uint32_t unguarded = cache_.unguarded(query_ + static_cast<std::uint32_t>(j));
      Candidate mine;
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
        if (cache_.may_leave(own[n].position, unguarded)) mine.take(own[n]);
      const Candidate victim = warp_first(mine);
      if (!may_go(victim)) return j;
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
        if (own[n].position == victim.position) own[n] = {};
      gone = max(gone, victim.position + 1);
      if (at_.lane == 0)
        run_.victims[of(j)] = {victim.slot, victim.position}, run_.gone[of(j)] = gone;
    }
    return to;
  }
  /// Whether it is the first of all. Squeezed, tokens that came in the run have no slot yet for
  /// exponentials of their own: none that is younger than they may leave.
  __device__ bool may_go(const Candidate& victim) const {
    return victim.before(outside_) && (!kSqueezed || victim.position < query_);
  }

  /// What queries [from, to) show this thread's token, up to the first before which another token
  /// than foretold would leave, which is returned.
  __device__ int observe_own(int from, int to) {
    static_assert(kReplayAhead == 8);
    const int begin = max(from, entry_), end = min(to, exit_);
    const bool comes = entry_ >= from && entry_ < to, is = comes || holds_;
    Exponentials e[kReplayAhead];
    std::uint64_t ranks[kReplayAhead];
#pragma unroll
    for (int n = 0; n < kReplayAhead; ++n) {
      e[n] = {};
      const int j = from + n;
      if (is && j >= begin && j < end) e[n] = fetch(j, slot_, position_);
    }
    const Slot before = state_;
#pragma unroll
    for (int n = 0; n < kReplayAhead; ++n) {
      const int j = from + n;
      if (!is || j >= to) continue;
      const std::uint32_t query = query_ + static_cast<std::uint32_t>(j);
      if (j > entry_) ranks[n] = cache_.rank_of(state_, position_, cache_.step_at(query, 0));
      if (j == exit_) {
        run_.ranks[n] = ranks[n];
        if (!may_go({ranks[n], position_, slot_})) atomicMin(&run_.right, j);
      }
      show(j, begin, end, e[n]);
    }
    __syncthreads();
    if (leaves_ && is) {
#pragma unroll
      for (int n = 0; n < kReplayAhead; ++n) {
        const int j = from + n;
        if (j >= to || j >= exit_ || j <= entry_) continue;
        const Candidate own{ranks[n], position_, slot_};
        if (cache_.may_leave(position_, cache_.unguarded(query_ + static_cast<std::uint32_t>(j))) &&
            own.before({run_.ranks[n], run_.victims[of(j)].y, 0}))
          atomicMin(&run_.right, j);
      }
    }
    __syncthreads();
    const int done = min(run_.right, to);
    if (is && done < to) {
      state_ = before;
#pragma unroll
      for (int n = 0; n < kReplayAhead; ++n)
        if (from + n < done) show(from + n, begin, end, e[n]);
    }
    if (exit_ < done) holds_ = false;
    if (exit_ != kNever && exit_ >= done) run_.exits[at_.thread] = exit_ = kNever;
    if (comes && entry_ < done) holds_ = true;
    return done;
  }
  /// What query j shows it, where it attends [begin, end).
  __device__ void show(int j, int begin, int end, const Exponentials& e) {
    if (j < begin || j >= end) return;
    const std::uint32_t query = query_ + static_cast<std::uint32_t>(j);
    const Step attended = step_at(j);
    if (j == entry_) cache_.admit_state(state_, query, attended);
    P::observe(state_, Look(run_.looks[of(j)], query).seen(e), cache_.params(), attended);
  }
  /// The step of query j, after its token has come.
  __device__ Step step_at(int j) const {
    Step step = cache_.step_at(query_ + static_cast<std::uint32_t>(j), 1);
    step.live = live_ + (leaves_ ? 0 : static_cast<std::uint32_t>(j) + 1);
    return step;
  }

  // Squeezed positions.

  /// Exponentials of the old tokens for queries [from, to), or up to as many as their list has room
  /// for; says which.
  __device__ int attend_old(int from, int to) {
    if (run_.gone[of(to - 1)] == 0) return to;
    stage_.take((first_ + from) / kReplayAhead);
    to = fitting(from, to);
    for (std::uint32_t slot = at_.thread; slot < live_; slot += at_.threads)
      list_versions(slot, from, to);
    __syncthreads();
    const ListedSlots old = cache_.listed();
    take_old_keys<kQuads>(at_.args, at_.unit, at_.rule.first_slot, stage_, old);
    __syncthreads();
    if (at_.thread == 0) shared_.listed = 0;
    return to;
  }

  /// Old tokens are listed once, and again at each query that changes their distance.
  __device__ int fitting(int from, int to) {
    for (int j = from + static_cast<int>(at_.warp); j < to; j += static_cast<int>(at_.warps)) {
      const std::uint32_t victim = run_.victims[of(j)].y, gone = run_.gone[of(j)],
                          before = j > from ? run_.gone[of(j - 1)] : 0;
      ReplayRange moved{0, gone};
      if (j > from && leaves_)
        moved = victim < before ? ReplayRange{victim, gone} : ReplayRange{before, gone};
      const std::uint32_t count = cache_.count_live(moved);
      if (at_.lane == 0) run_.items[of(j)] = count;
    }
    __syncthreads();
    std::uint32_t items = 0;
    for (int j = from; j < to; ++j) {
      items += run_.items[of(j)];
      if (j > from && items > cache_.list_room()) return j;
    }
    return to;
  }

  /// A slot's token for each range of [from, to) in which it is old and its distance the same.
  __device__ void list_versions(std::uint32_t slot, int from, int to) {
    const std::uint32_t position = cache_.position(slot);
    if (position >= run_.gone[of(to - 1)]) return;
    std::uint32_t place = cache_.place(slot), distance = 0;
    const int origin = (first_ + from) / kReplayAhead * kReplayAhead - first_;
    int start = -1, j = from;
    const auto list = [&] {
      if (start >= 0)
        cache_.add_to_list(OldItem::of(slot, distance, static_cast<std::uint32_t>(start - origin),
                                       static_cast<std::uint32_t>(j - origin)));
    };
    for (; j < to; ++j) {
      const uint2 victim = run_.victims[of(j)];
      if (victim.x == slot) break;
      if (leaves_ && victim.y > position) ++place;
      const std::uint32_t now = query_ + static_cast<std::uint32_t>(j) - place;
      if (position >= run_.gone[of(j)] || (start >= 0 && now == distance)) continue;
      list();
      start = j, distance = now;
    }
    list();
  }

  /// Tokens that are older than those that left have lost a younger one for each.
  __device__ void close_up(int from, int done) {
    if (!leaves_) return;
    for (std::uint32_t slot = at_.thread; slot < live_; slot += at_.threads) {
      const std::uint32_t position = cache_.position(slot);
      std::uint32_t younger = 0;
      for (int j = from; j < done; ++j) younger += run_.victims[of(j)].y > position ? 1 : 0;
      cache_.move_place(slot, younger);
    }
  }

  // Afterwards.

  /// What kCount queries from j on show a slot's token: no branches, or one load would wait for
  /// another.
  template <int kCount>
  __device__ void show_some(Slot& state, int j, std::uint32_t slot, std::uint32_t position) const {
    Exponentials e[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) e[n] = fetch(j + n, slot, position);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const Look look(run_.looks[of(j + n)], query_ + static_cast<std::uint32_t>(j + n));
      P::observe(state, look.seen(e[n]), cache_.params(), step_at(j + n));
    }
  }
  /// What queries [from, to) show the others.
  __device__ void observe_others(int from, int to) {
    for (std::uint32_t slot = at_.thread; slot < live_; slot += at_.threads) {
      if (is_candidate(slot)) continue;
      const std::uint32_t position = cache_.position(slot);
      Slot state = cache_.state(slot);
      int j = from;
      for (; j + kAtOnce <= to; j += kAtOnce) show_some<kAtOnce>(state, j, slot, position);
      for (; j < to; ++j) show_some<1>(state, j, slot, position);
      cache_.put(slot, state);
    }
  }

  /// Tokens are in the slots again, by age.
  __device__ void end(int done) {
    if (holds_ && !is_entrant()) {
      cache_.put(slot_, state_);
      atomicAnd(words_ + slot_ / kWarpSize, ~(1u << slot_ % kWarpSize));
    }
    __syncthreads();
    const std::uint32_t old = leaves_ && done > 0 ? cache_.close_gaps(words_, live_) : live_;
    if (holds_ && is_entrant()) {
      std::uint32_t slot = old;
      for (std::uint32_t t = candidates(); t < at_.thread; ++t)
        slot += run_.exits[t] == kNever ? 1 : 0;
      cache_.take_slot(slot, position_);
      cache_.put(slot, state_);
    }
    cache_.end_run(static_cast<std::uint32_t>(done));
    __syncthreads();
  }

  const ReplayPlace& at_;
  ReplayShared& shared_;
  ReplayRunShared& run_;
  Cache& cache_;
  OldKeyStage& stage_;
  std::uint32_t* const words_;  ///< bits of the candidates' slots
  // Exponentials: [query, quad, token] from the run's first on; [plane, quad, slot].
  const float4 *full_rows_ = nullptr, *rows_ = nullptr;
  const std::int64_t row_, plane_;
  const float4* const own_;
  int first_ = 0, count_ = 0, parity_ = 0;
  std::uint32_t query_ = 0, live_ = 0;  ///< at the run's start
  bool leaves_ = false;                 ///< each token that enters takes another's place
  Candidate outside_;                   ///< the first of those that are no candidates

  // This thread's token:
  bool holds_ = false;
  std::uint32_t slot_ = 0, position_ = 0;  ///< slots from live_ on: of the tokens that enter
  int entry_ = -1, exit_ = kNever;         ///< queries that it comes and leaves before
  Slot state_;
};

}  // namespace kvlab::kernels
