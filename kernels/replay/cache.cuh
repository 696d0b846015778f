// The slots of one cache: who is live, where, in what state; admission, eviction and rank by the
// policy's own text.
#pragma once

#include "kernels/replay/layer_ranks.cuh"
#include "kernels/replay/old_keys.cuh"
#include "kernels/replay/rungs.cuh"
#include "kernels/replay/smooth.cuh"
#include "kernels/replay/victim.cuh"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// Threads have slots as ReplayPlace::for_slots() says. They lie in shared memory through the block
/// of queries, where they fit (kInRoom). kRungs: of a ladder.
template <class P, bool kSqueezed, bool kInRoom, bool kRungs>
class ReplayCache {
 public:
  using Slot = typename P::Slot;
  static constexpr std::uint32_t kNoPosition = ~0u;
  static constexpr int kStrip = replay_strip(kSqueezed);
  static constexpr std::uint32_t kColumns = P::kInfo.column_count();

  /// `live_words`: bits of the live positions, and behind them of those on each rung; `room`: for
  /// the slots.
  __device__ ReplayCache(const ReplayPlace& at, ReplayShared& shared, std::uint32_t* live_words,
                         std::byte* room)
      : at_(at),
        shared_(shared),
        live_words_(live_words),
        guards_{.sinks = at.rule.rule.sinks, .recent = at.rule.rule.recent},
        rungs_(at, live_words + bytes_of_words(at.args) / sizeof(std::uint32_t),
               rungs_in(at, room)) {
    const ReplayArgs& args = at.args;
    if constexpr (!std::is_empty_v<typename P::Params>)
      params_ = *reinterpret_cast<const typename P::Params*>(args.params + at.rule.params);
    if constexpr (kColumns > 0)
      columns_ = args.columns +
                 (std::int64_t{at.unit} * args.column_count + at.rule.columns) * args.shape.tokens;
    progress_ = stored_progress();
    now_ = admission(progress_.admission);
    next_ = admission(progress_.admission + 1);
    if constexpr (kInRoom) {
      states_ = reinterpret_cast<Slot*>(room);
      const std::uint32_t slots = whole_strips(args.room_slots, kSqueezed);
      positions_ = reinterpret_cast<std::uint32_t*>(
          room + slots * (std::is_empty_v<Slot> ? 0 : sizeof(Slot)));
      places_ = positions_ + slots;
      listed_ = reinterpret_cast<OldItem*>(places_ + slots);
    } else {
      states_ = stored_states();
      positions_ = args.caches.positions + at.first_slot;
      places_ = args.caches.places + at.first_slot;
      listed_ = reinterpret_cast<OldItem*>(args.caches.ranks + at.first_slot);
    }
    move_in();
  }

  __device__ const typename P::Params& params() const { return params_; }
  /// Bits of the live positions.
  __device__ const std::uint32_t* live_words() const { return live_words_; }
  __device__ const ReplayAdmission& now() const { return now_; }
  __device__ std::uint32_t live() const { return progress_.live; }
  __device__ const std::uint32_t* positions() const { return positions_; }
  __device__ const std::uint32_t* places() const { return places_; }
  __device__ std::uint32_t position(std::uint32_t i) const { return positions_[i]; }
  /// Whether the slot holds a token up to `query`, of which there are `visible`. Where slots are in
  /// shared memory, those that hold none say so.
  __device__ bool holds(std::uint32_t i, std::uint32_t query, std::uint32_t visible) const {
    return kInRoom ? positions_[i] <= query : i < visible;
  }
  __device__ std::uint32_t place(std::uint32_t i) const { return places_[i]; }
  /// Of what copy tokens are.
  __device__ SlotCopies copies() const {
    return {rungs_.of_slot(), positions_, rungs_.copies(), exact_from()};
  }
  /// Whether the token has lost a younger one, so that its logits are the cache's own.
  __device__ bool is_old(std::uint32_t i) const {
    return kSqueezed && positions_[i] < progress_.gone;
  }
  /// Old tokens whose distance to the query has changed since it was last said to be known.
  __device__ ReplayRange moved() const { return moved_; }
  __device__ void set_moved(const ReplayRange& range) { moved_ = range; }
  /// The slots of the live tokens of a range, with their distance to a query, for [first, end) of
  /// its run: by the whole block, in no order.
  __device__ ListedSlots list(const ReplayRange& range, std::uint32_t query,
                              std::uint32_t first_of_run, std::uint32_t end) {
    for (std::uint32_t first = at_.first_slot_of_thread<kStrip>();
         first - at_.lane < progress_.live; first += kStrip * at_.threads) {
      std::uint32_t masks[kStrip], count = 0;
#pragma unroll
      for (int k = 0; k < kStrip; ++k) {
        const std::uint32_t slot = first + k * kWarpSize;
        masks[k] = __ballot_sync(~0u, slot < progress_.live && range.has(positions_[slot]));
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
              OldItem::of(slot, query - places_[slot], first_of_run, end);
        before += __popc(masks[k]);
      }
    }
    __syncthreads();
    return {listed_, shared_.listed, positions_};
  }
  __device__ Slot state(std::uint32_t i) const {
    if constexpr (std::is_empty_v<Slot>)
      return {};
    else
      return states_[i];
  }
  __device__ void put(std::uint32_t i, const Slot& state) {
    if constexpr (!std::is_empty_v<Slot>) states_[i] = state;
  }
  __device__ Step step_at(std::uint32_t now, std::uint32_t queries) const {
    const ReplayArgs& args = at_.args;
    return {.now = now,
            .budget = at_.rule.rule.budget,
            .live = progress_.live,
            .queries = queries,
            .seed = at_.rule.seed,
            .sequence = args.sequence,
            .layer = args.layers[at_.unit],
            .kv_head = args.kv_heads[at_.unit]};
  }

  /// Makes room for the current admission's tokens and admits them.
  __device__ void begin() {
    const std::uint32_t leaving = surplus(progress_.admission);
    std::uint32_t first = progress_.live;
    if (leaving == 1 && now_.tokens == 1 && progress_.victim > 0) {
      first = static_cast<std::uint32_t>(progress_.victim - 1);
      if (kSqueezed) close_up();
      if (kSqueezed) note_moved();
      progress_.gone = max(progress_.gone, progress_.victim_position + 1);
      if constexpr (kRungs)
        if (at_.thread == 0) rungs_.leave(progress_.victim_position);
      if (at_.thread == 0)
        live_words_[progress_.victim_position / 32] &= ~(1u << progress_.victim_position % 32);
    } else {
      if constexpr (kRungs)
        deal(leaving);
      else if (leaving > 0)
        evict_many(leaving);
      moved_ = ReplayRange::all();
      first = progress_.live;
      progress_.live += now_.tokens;
    }
    progress_.evictions += leaving;
    progress_.most_live = max(progress_.most_live, progress_.live);
    progress_.victim = 0;
    if (now_.tokens == 1)
      admit_one(first);
    else
      admit_many(first);
    if constexpr (kRungs) __syncthreads();
  }

  /// Ends the current admission.
  __device__ void end() {
    ++progress_.admission;
    now_ = next_;
    if (next_.tokens > 0) next_ = admission(progress_.admission + 1);
  }

  /// Whether one token leaves by its own rank, for one to enter, when the next admission begins.
  __device__ bool ranks_next() const {
    const std::uint32_t next = progress_.admission + 1;
    const bool leaves = next_.tokens == 1 && surplus(next) == 1;
    if constexpr (kRungs) {
      if (next_.tokens != 1 || !makes_room(next) || !rungs_.one_goes(leaves)) return false;
    } else if (!leaves) {
      return false;
    }
    return !smooths(next) && !at_.args.layer_heads;
  }
  /// How many positions from the sinks on are unguarded at `now`.
  __device__ std::uint32_t unguarded(std::uint32_t now) const {
    const std::uint32_t kept = guards_.sinks + (guards_.recent == 0 ? 0 : guards_.recent - 1);
    return now > kept ? now - kept : 0;
  }
  /// A slot's token among those that may leave, of which there are as many positions.
  __device__ void rank(Candidate& first, std::uint32_t i, const Slot& own, const Step& leaves,
                       std::uint32_t unguarded) const {
    const std::uint32_t position = positions_[i];
    if (position - guards_.sinks < unguarded)
      first.take({rank_key(P::rank(own, token(position), params_, leaves)), position, i});
  }
  /// The block's first is the next victim.
  __device__ void choose(const Candidate& mine) {
    parity_ ^= 1;
    const Candidate first = block_first(mine, shared_.first[parity_], at_);
    progress_.victim = static_cast<std::int32_t>(first.slot + 1);
    progress_.victim_position = first.position;
  }

  /// Likewise of a ladder, on which each rung's first may go down.
  __device__ void step_down(std::uint32_t now) {
    const Step leaves = step_at(now, 0);
    std::uint64_t* const ranks = at_.args.caches.ranks + at_.first_slot;
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      ranks[i] = rank_key(P::rank(state(i), token(positions_[i]), params_, leaves));
    });
    const Leaving first = rungs_.template step_down<kStrip>(
        {ranks, positions_, guards_, now}, progress_.live, surplus(progress_.admission + 1) > 0);
    progress_.victim = first.slot + 1;  // 0: nobody's
    progress_.victim_position = first.key.position;
  }

  /// Bits of the live positions from `first` on, to words [0, tokens / 32], zeros before.
  __device__ void copy_live(std::uint32_t* words, std::uint32_t tokens, std::uint32_t first) const {
    for (std::uint32_t w = at_.thread; w * 32 < tokens; w += at_.threads) {
      const std::uint32_t before = first > w * 32 ? min(first - w * 32, 32u) : 0;
      words[w] = before < 32 ? live_words_[w] >> before << before : 0;
    }
  }
  /// Likewise of one copy, of all live positions.
  __device__ void copy_words(int copy, std::uint32_t* words, std::uint32_t tokens) const {
    for (std::uint32_t w = at_.thread; w * 32 < tokens; w += at_.threads)
      words[w] = rungs_.word(copy, w, exact_from());
  }
  /// Tokens from here on have lost no younger one.
  __device__ std::uint32_t first_young() const { return kSqueezed ? progress_.gone : 0; }

  __device__ void move_out() {
    const ReplayCaches& caches = at_.args.caches;
    if constexpr (kInRoom)
      for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads) {
        caches.positions[at_.first_slot + i] = positions_[i];
        if (kSqueezed) caches.places[at_.first_slot + i] = places_[i];
        if constexpr (!std::is_empty_v<Slot>) stored_states()[i] = states_[i];
        if constexpr (kRungs) caches.rungs[at_.first_slot + i] = rungs_.of_slot()[i];
      }
    if (at_.thread == 0) stored_progress() = progress_;
  }

 private:
  __device__ static std::uint8_t* rungs_in(const ReplayPlace& at, std::byte* room) {
    if constexpr (!kRungs)
      return nullptr;
    else if constexpr (kInRoom)
      return reinterpret_cast<std::uint8_t*>(
          room + whole_strips(at.args.room_slots, kSqueezed) *
                     ((std::is_empty_v<Slot> ? 0 : sizeof(Slot)) + sizeof(std::uint32_t)));
    else
      return at.args.caches.rungs + at.first_slot;
  }
  /// Tokens of an admission of several are not coded before it has ended.
  __device__ std::uint32_t exact_from() const { return now_.tokens > 1 ? now_.first : ~0u; }
  __device__ ReplayProgress& stored_progress() const {
    return at_.args.caches.progress[at_.figure()];
  }
  __device__ Slot* stored_states() const {
    const ReplayCaches& caches = at_.args.caches;
    return reinterpret_cast<Slot*>(caches.states + at_.first_slot * caches.slot_stride);
  }
  /// A token with what it brings; of the live ones.
  __device__ Token token(std::uint32_t position) const {
    Token token{position};
#pragma unroll
    for (std::uint32_t c = 0; c < kColumns; ++c)
      token.column[c] = columns_[std::int64_t{position} * kColumns + c];
    return token;
  }
  __device__ ReplayAdmission admission(std::uint32_t index) const {
    return at_.args.admissions[at_.rule.admissions + index];
  }
  /// Whether the admission before that one ended a prompt segment; only where it matters.
  __device__ bool is_after_prompt(std::uint32_t index) const {
    return at_.rule.looks_back && index > 0 && admission(index - 1).ends_prompt;
  }
  /// How many tokens leave before an admission.
  __device__ std::uint32_t surplus(std::uint32_t index) const {
    if (progress_.live < at_.rule.room_at) return 0;
    if (at_.rule.looks_back && at_.rule.modifiers.once && !is_after_prompt(index)) return 0;
    return progress_.live - (at_.rule.rule.budget - 1);
  }
  /// Whether a ladder does before an admission.
  __device__ bool makes_room(std::uint32_t index) const {
    return surplus(index) > 0 ||
           (at_.rule.room_at != ~0u && rungs_.is_full(at_.rule.modifiers, is_after_prompt(index)));
  }
  __device__ bool smooths(std::uint32_t index) const {
    return at_.rule.looks_back && at_.rule.modifiers.smooths(is_after_prompt(index));
  }

  __device__ void move_in() {
    const ReplayCaches& caches = at_.args.caches;
    if constexpr (kInRoom)
      for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads) {
        positions_[i] = caches.positions[at_.first_slot + i];
        if (kSqueezed) places_[i] = caches.places[at_.first_slot + i];
        if constexpr (!std::is_empty_v<Slot>) states_[i] = stored_states()[i];
        if constexpr (kRungs) rungs_.of_slot()[i] = caches.rungs[at_.first_slot + i];
      }
    empty(progress_.live, whole_strips(at_.args.room_slots, kSqueezed));
    mark_live();
  }
  /// Slots [first, end) hold no token.
  __device__ void empty(std::uint32_t first, std::uint32_t end) {
    if constexpr (kInRoom)
      for (std::uint32_t i = first + at_.thread; i < end; i += at_.threads)
        positions_[i] = kNoPosition;
  }
  /// Live bits from the positions.
  __device__ void mark_live() {
    const auto words = static_cast<std::uint32_t>(at_.args.samples.words);
    for (std::uint32_t w = at_.thread; w < words; w += at_.threads) live_words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads)
      atomicOr(live_words_ + positions_[i] / 32, 1u << positions_[i] % 32);
    __syncthreads();
    if constexpr (kRungs) rungs_.find(positions_, progress_.live);
  }

  __device__ void admit_one(std::uint32_t slot) {
    if (at_.has_slot<kStrip>(slot)) admit(slot, now_.first, step_at(now_.first, 1));
    if (at_.thread == 0) live_words_[now_.first / 32] |= 1u << now_.first % 32;
    if constexpr (kRungs)
      if (at_.thread == 0) rungs_.admit(now_.first);
  }
  __device__ void admit_many(std::uint32_t first) {
    const Step admits = step_at(now_.first, now_.tokens);
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      if (i >= first) {
        const std::uint32_t position = now_.first + (i - first);
        admit(i, position, admits);
        atomicOr(live_words_ + position / 32, 1u << position % 32);
      }
      if (P::kInfo.needs != Needs::nothing) at_.args.caches.seen[at_.first_slot + i] = {};
    });
    if constexpr (kRungs) {
      __syncthreads();
      rungs_.find(positions_, progress_.live);
    }
  }
  __device__ void admit(std::uint32_t i, std::uint32_t position, const Step& admits) {
    positions_[i] = position;
    if (kSqueezed) places_[i] = position;
    if constexpr (kRungs) rungs_.of_slot()[i] = 0;
    Slot state;
    P::admit(state, token(position), params_, admits);
    put(i, state);
  }

  /// Tokens that are older than the one victim have lost a younger one.
  __device__ void close_up() {
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      places_[i] += positions_[i] < progress_.victim_position ? 1 : 0;
    });
  }

  /// Old tokens that are younger than the one victim, and tokens that have become old.
  __device__ void note_moved() {
    const std::uint32_t victim = progress_.victim_position, gone = progress_.gone;
    moved_.take(victim < gone ? ReplayRange{victim + 1, gone} : ReplayRange{gone, victim});
  }

  /// Of all tokens, were the current admission's to come next.
  __device__ LeavingKeys leaving_keys() {
    const std::uint32_t live = progress_.live;
    const Step leaves = step_at(now_.first, 0);
    std::uint64_t* const ranks = at_.args.caches.ranks + at_.first_slot;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
      ranks[i] = rank_key(P::rank(state(i), token(positions_[i]), params_, leaves));
    if (at_.thread == 0) shared_.moves = shared_.gone = 0;
    __syncthreads();
    if (at_.args.layer_heads)
      sum_layer_ranks(at_.args, at_.unit, at_.rule.first_slot, progress_.live, kRankType<P>);
    if (smooths(progress_.admission)) smooth(ranks);
    return {ranks, positions_, guards_, now_.first};
  }

  __device__ void evict_many(std::uint32_t leaving) {
    const LeavingKeys keys = leaving_keys();
    LeavingThreshold threshold{};
    if (leaving < progress_.live)
      threshold = select_leaving(shared_.selection, keys, progress_.live, leaving);
    take_out(leaving, [&](std::uint32_t i) { return !threshold.leaves(keys[i]); });
  }

  /// On a ladder, where it makes room: of each rung with more than it has room for the first to
  /// leave go down.
  __device__ void deal(std::uint32_t leaving) {
    const bool makes = makes_room(progress_.admission);
    __syncthreads();
    if (!makes) return;
    const LeavingKeys keys = leaving_keys();
    const std::uint32_t live = progress_.live, kept = at_.rule.rule.budget - 1;
    std::uint32_t over = 0;
    for (int r = 0; r < rungs_.count(); ++r) {
      // Where nobody is to leave yet, some wait on the first for the burst.
      const std::uint32_t here = rungs_.on(r) + over,
                          waiting = r > 0 || leaving > 0 || live < kept ? 0 : live - kept,
                          room = rungs_.slots(r) + waiting - (r == 0 ? 1 : 0);
      over = here > room ? here - room : 0;
      if (over == 0) continue;
      const OneRungKeys own{keys, rungs_.of_slot(), r};
      const bool all = over == here, last = r + 1 == rungs_.count();
      LeavingThreshold threshold{};
      if (!all) threshold = select_leaving(shared_.selection, own, live, over);
      const auto goes = [&](std::uint32_t i) {
        return rungs_.of_slot()[i] == r && (all || threshold.leaves(own[i]));
      };
      if (last) return take_out(over, [&](std::uint32_t i) { return !goes(i); });
      for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
        if (goes(i)) rungs_.of_slot()[i] = static_cast<std::uint8_t>(r + 1);
      __syncthreads();
    }
    __syncthreads();  // find() empties the counts that the last rungs were compared by
    rungs_.find(positions_, live);
  }

  /// By `stays`, of a slot.
  template <class Stays>
  __device__ void take_out(std::uint32_t leaving, Stays stays) {
    const std::uint32_t live = progress_.live, kept = live - leaving, now = now_.first,
                        before = progress_.gone;
    const ReplayCaches& caches = at_.args.caches;
    std::uint32_t *const holes = caches.holes + at_.first_slot, *const fillers =
                                                                    caches.fillers + at_.first_slot;
    progress_.live = kept;
    progress_.gone = now;
    if (kept > 0) {
      for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
        if (!stays(i)) atomicMax(&shared_.gone, positions_[i] + 1);
      number_stayers(shared_.selection, live, stays,
                     [&](std::uint32_t i, bool here, std::uint32_t before) {
                       if (i < kept && !here) holes[i - before] = i;
                     });
      // As many stay beyond `kept` as leave before it.
      number_stayers(shared_.selection, live, stays,
                     [&](std::uint32_t i, bool here, std::uint32_t before) {
                       if (i < kept || !here) return;
                       fillers[kept - before - 1] = i;
                       atomicMax(&shared_.moves, kept - before);
                     });
      for (std::uint32_t m = at_.thread; m < shared_.moves; m += at_.threads) {
        positions_[holes[m]] = positions_[fillers[m]];
        if constexpr (!std::is_empty_v<Slot>) states_[holes[m]] = states_[fillers[m]];
        if constexpr (kRungs) rungs_.of_slot()[holes[m]] = rungs_.of_slot()[fillers[m]];
      }
      __syncthreads();
      progress_.gone = max(before, shared_.gone);
      empty(kept, live);
      if (kSqueezed) {
        __syncthreads();  // four positions are read at a time, also past the last live one
        number_by_age(now);
      }
    }
    if (kept == 0) empty(0, live);
    mark_live();
  }

  /// What was seen is of no account between two admissions.
  __device__ void smooth(std::uint64_t* ranks) const {
    const ReplayCaches& caches = at_.args.caches;
    smooth_ranks({ranks, positions_, live_words_, progress_.live, caches.seen + at_.first_slot,
                  caches.fillers + at_.first_slot},
                 at_.rule.modifiers, kRankType<P>);
  }

  __device__ void number_by_age(std::uint32_t now) {
    for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads) {
      std::uint32_t younger = 0;
      for (std::uint32_t j = 0; j < progress_.live; ++j)
        younger += positions_[j] > positions_[i] ? 1 : 0;
      places_[i] = now - 1 - younger;
    }
  }

  const ReplayPlace& at_;
  ReplayShared& shared_;
  std::uint32_t* live_words_;
  const Guards guards_;
  std::conditional_t<kRungs, ReplayRungs, NoRungs> rungs_;
  typename P::Params params_{};
  const float* columns_ = nullptr;  // [token, kColumns]
  ReplayProgress progress_;
  ReplayAdmission now_, next_;
  std::uint32_t *positions_, *places_;
  OldItem* listed_;
  ReplayRange moved_ = ReplayRange::all();
  Slot* states_;
  int parity_ = 0;
};

}  // namespace kvlab::kernels
