// The slots of one cache: who is live, where, in what state; admission, eviction and rank by the
// policy's own text.
#pragma once

#include "kernels/replay/ranks.cuh"
#include "kernels/replay/rungs.cuh"
#include "kernels/replay/squeezed.cuh"
#include "kernels/replay/victim.cuh"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// Threads have slots as CacheThread::for_slots() says. They lie in shared memory through the block
/// of queries, where they fit. Tokens: ExactTokens, SqueezedTokens or LadderTokens.
template <class P, class Tokens>
class ReplayCache {
 public:
  using Slot = typename P::Slot;
  static constexpr bool kInShared = Tokens::kInShared, kHasState = !std::is_empty_v<Slot>;
  static constexpr std::uint32_t kNoPosition = ~0u;
  static constexpr int kStrip = replay_strip(Tokens::kSqueezed);
  static constexpr std::uint32_t kColumns = P::kInfo.column_count();

  /// `dynamic`: shared memory for bits of the live positions, what tokens have before the slots,
  /// and, where they fit, the slots.
  __device__ ReplayCache(const CacheThread& at, ReplayShared& shared, std::byte* dynamic)
      : at_(at),
        shared_(shared),
        live_words_(reinterpret_cast<std::uint32_t*>(dynamic)),
        guards_{.sinks = at.rule.rule.sinks, .recent = at.rule.rule.recent},
        states_(kInShared ? states_in(at, dynamic) : stored_states(at)),
        positions_(kInShared ? positions_in(at, dynamic) : at.args.slots.positions + at.first_slot),
        tokens_(at, shared, dynamic + bytes_of_words(at.args.shape),
                reinterpret_cast<std::byte*>(positions_ + shared_slots(at)), positions_,
                shared_slots(at)) {
    if constexpr (!std::is_empty_v<typename P::Params>)
      params_ = *reinterpret_cast<const typename P::Params*>(at.rule.params);
    progress_ = at.args.progress[at.cache()];
    now_ = admission(progress_.admission);
    next_ = admission(progress_.admission + 1);
    move_in();
  }

  __device__ Tokens& tokens() { return tokens_; }
  __device__ const Tokens& tokens() const { return tokens_; }
  __device__ const typename P::Params& params() const { return params_; }
  /// Bits of the live positions.
  __device__ const std::uint32_t* live_words() const { return live_words_; }
  __device__ const ReplayAdmission& now() const { return now_; }
  __device__ std::uint32_t live() const { return progress_.live; }
  __device__ const std::uint32_t* positions() const { return positions_; }
  __device__ std::uint32_t position(std::uint32_t i) const { return positions_[i]; }
  /// Whether the slot holds a token up to `query`, of which there are `visible`. Where slots are in
  /// shared memory, those that hold none say so.
  __device__ bool holds(std::uint32_t i, std::uint32_t query, std::uint32_t visible) const {
    return kInShared ? positions_[i] <= query : i < visible;
  }
  /// Of what copy tokens are.
  __device__ auto copies() const { return tokens_.copies(exact_from()); }
  __device__ Slot state(std::uint32_t i) const {
    if constexpr (kHasState)
      return states_[i];
    else
      return {};
  }
  __device__ void put(std::uint32_t i, const Slot& state) {
    if constexpr (kHasState) states_[i] = state;
  }
  __device__ Step step_at(std::uint32_t now, std::uint32_t queries) const {
    const ReplayRule& rule = at_.rule;
    return {.now = now,
            .budget = rule.rule.budget,
            .live = progress_.live,
            .queries = queries,
            .seed = rule.seed,
            .sequence = rule.sequence,
            .layer = rule.layer,
            .kv_head = rule.kv_head};
  }

  /// Makes room for the current admission's tokens and admits them.
  __device__ void begin() {
    const std::uint32_t leaving = surplus(progress_.admission);
    std::uint32_t first = progress_.live;
    if (leaving == 1 && now_.tokens == 1 && progress_.victim > 0) {
      first = static_cast<std::uint32_t>(progress_.victim - 1);
      tokens_.lose(progress_.victim_position, progress_.live);
      if (at_.thread == 0)
        live_words_[progress_.victim_position / 32] &= ~(1u << progress_.victim_position % 32);
    } else {
      if constexpr (Tokens::kLadder)
        deal(leaving);
      else if (leaving > 0)
        evict_many(leaving);
      tokens_.move_all();
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
    if constexpr (Tokens::kLadder) __syncthreads();
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
    if constexpr (Tokens::kLadder) {
      if (next_.tokens != 1 || !makes_room(next) || !tokens_.one_goes(leaves)) return false;
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
  /// The thread block's first is the next victim.
  __device__ void choose(const Candidate& mine) {
    parity_ ^= 1;
    const Candidate first = block_first(mine, shared_.first[parity_], at_);
    progress_.victim = static_cast<std::int32_t>(first.slot + 1);
    progress_.victim_position = first.position;
  }

  /// Likewise of a ladder, on which each rung's first may go down.
  __device__ void step_down(std::uint32_t now) {
    const Step leaves = step_at(now, 0);
    std::uint64_t* const ranks = at_.args.slots.ranks + at_.first_slot;
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      ranks[i] = rank_key(P::rank(state(i), token(positions_[i]), params_, leaves));
    });
    const Leaving first = tokens_.template step_down<kStrip>(
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
      words[w] = tokens_.word(copy, w, exact_from());
  }

  __device__ void move_out() {
    const ReplaySlots& slots = at_.args.slots;
    if constexpr (kInShared)
      for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads) {
        slots.positions[at_.first_slot + i] = positions_[i];
        tokens_.move_out(i);
        if constexpr (kHasState) stored_states(at_)[i] = states_[i];
      }
    progress_.gone = tokens_.gone();
    if (at_.thread == 0) at_.args.progress[at_.cache()] = progress_;
  }

 private:
  __device__ static std::uint32_t shared_slots(const CacheThread& at) {
    return whole_strips(at.args.most_slots, Tokens::kSqueezed);
  }
  __device__ static Slot* states_in(const CacheThread& at, std::byte* dynamic) {
    return reinterpret_cast<Slot*>(
        dynamic + bytes_of_words(at.args.shape) +
        Tokens::bytes_before_slots(static_cast<const typename Tokens::Args&>(at.args)));
  }
  __device__ static std::uint32_t* positions_in(const CacheThread& at, std::byte* dynamic) {
    return reinterpret_cast<std::uint32_t*>(states_in(at, dynamic) +
                                            (kHasState ? shared_slots(at) : 0));
  }
  __device__ static Slot* stored_states(const CacheThread& at) {
    const ReplaySlots& slots = at.args.slots;
    return reinterpret_cast<Slot*>(slots.states + at.first_slot * slots.state_stride);
  }
  /// Tokens of an admission of several are not coded before it has ended.
  __device__ std::uint32_t exact_from() const { return now_.tokens > 1 ? now_.first : ~0u; }
  /// A token with what it brings; of the live ones.
  __device__ Token token(std::uint32_t position) const {
    Token token{position};
#pragma unroll
    for (std::uint32_t c = 0; c < kColumns; ++c)
      token.column[c] = at_.rule.columns[std::int64_t{position} * kColumns + c];
    return token;
  }
  __device__ ReplayAdmission admission(std::uint32_t index) const {
    return at_.rule.admissions[index];
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
           (at_.rule.room_at != ~0u && tokens_.is_full(at_.rule.modifiers, is_after_prompt(index)));
  }
  __device__ bool smooths(std::uint32_t index) const {
    return at_.rule.looks_back && at_.rule.modifiers.smooths(is_after_prompt(index));
  }

  __device__ void move_in() {
    const ReplaySlots& slots = at_.args.slots;
    if constexpr (kInShared)
      for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads) {
        positions_[i] = slots.positions[at_.first_slot + i];
        tokens_.move_in(i);
        if constexpr (kHasState) states_[i] = stored_states(at_)[i];
      }
    empty(progress_.live, shared_slots(at_));
    mark_live();
  }
  /// Slots [first, end) hold no token.
  __device__ void empty(std::uint32_t first, std::uint32_t end) {
    if constexpr (kInShared)
      for (std::uint32_t i = first + at_.thread; i < end; i += at_.threads)
        positions_[i] = kNoPosition;
  }
  /// Live bits from the positions.
  __device__ void mark_live() {
    const auto words = static_cast<std::uint32_t>(at_.args.shape.words());
    for (std::uint32_t w = at_.thread; w < words; w += at_.threads) live_words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads)
      atomicOr(live_words_ + positions_[i] / 32, 1u << positions_[i] % 32);
    __syncthreads();
    tokens_.find(progress_.live);
  }

  __device__ void admit_one(std::uint32_t slot) {
    if (at_.has_slot<kStrip>(slot)) admit(slot, now_.first, step_at(now_.first, 1));
    if (at_.thread != 0) return;
    live_words_[now_.first / 32] |= 1u << now_.first % 32;
    tokens_.enter(now_.first);
  }
  __device__ void admit_many(std::uint32_t first) {
    const Step admits = step_at(now_.first, now_.tokens);
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      if (i >= first) {
        const std::uint32_t position = now_.first + (i - first);
        admit(i, position, admits);
        atomicOr(live_words_ + position / 32, 1u << position % 32);
      }
      if (P::kInfo.needs != Needs::nothing) at_.args.slots.seen[at_.first_slot + i] = {};
    });
    if constexpr (Tokens::kLadder) __syncthreads();
    tokens_.find(progress_.live);
  }
  __device__ void admit(std::uint32_t i, std::uint32_t position, const Step& admits) {
    positions_[i] = position;
    tokens_.admit(i, position);
    Slot state;
    P::admit(state, token(position), params_, admits);
    put(i, state);
  }

  /// Of all tokens, were the current admission's to come next.
  __device__ LeavingKeys leaving_keys() {
    const std::uint32_t live = progress_.live;
    const Step leaves = step_at(now_.first, 0);
    std::uint64_t* const ranks = at_.args.slots.ranks + at_.first_slot;
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
    const bool all = leaving == progress_.live;
    LeavingThreshold threshold{};
    if (!all) threshold = select_leaving(shared_.selection, keys, progress_.live, leaving);
    take_out(leaving, [&](std::uint32_t i) { return !all && !threshold.leaves(keys[i]); });
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
    for (int r = 0; r < tokens_.count(); ++r) {
      // Where nobody is to leave yet, some wait on the first for the burst.
      const std::uint32_t here = tokens_.on(r) + over,
                          waiting = r > 0 || leaving > 0 || live < kept ? 0 : live - kept,
                          room = tokens_.slots(r) + waiting - (r == 0 ? 1 : 0);
      over = here > room ? here - room : 0;
      if (over == 0) continue;
      const OneRungKeys own{keys, tokens_.of_slot(), r};
      const bool all = over == here, last = r + 1 == tokens_.count();
      LeavingThreshold threshold{};
      if (!all) threshold = select_leaving(shared_.selection, own, live, over);
      const auto goes = [&](std::uint32_t i) {
        return tokens_.of_slot()[i] == r && (all || threshold.leaves(own[i]));
      };
      if (last) return take_out(over, [&](std::uint32_t i) { return !goes(i); });
      for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
        if (goes(i)) tokens_.of_slot()[i] = static_cast<std::uint8_t>(r + 1);
      __syncthreads();
    }
    __syncthreads();  // find() empties the counts that the last rungs were compared by
    tokens_.find(live);
  }

  /// By `stays`, of a slot.
  template <class Stays>
  __device__ void take_out(std::uint32_t leaving, Stays stays) {
    const std::uint32_t live = progress_.live, kept = live - leaving;
    const ReplaySlots& slots = at_.args.slots;
    std::uint32_t *const holes = slots.holes + at_.first_slot, *const fillers =
                                                                   slots.fillers + at_.first_slot;
    progress_.live = kept;
    tokens_.lose_many(live, stays);
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
      if constexpr (kHasState) states_[holes[m]] = states_[fillers[m]];
      tokens_.move(holes[m], fillers[m]);
    }
    __syncthreads();
    empty(kept, live);
    tokens_.renumber(kept, now_.first);
    mark_live();
  }

  /// What was seen is of no account between two admissions.
  __device__ void smooth(std::uint64_t* ranks) const {
    const ReplaySlots& slots = at_.args.slots;
    smooth_ranks({ranks, positions_, live_words_, progress_.live, slots.seen + at_.first_slot,
                  slots.fillers + at_.first_slot},
                 at_.rule.modifiers, kRankType<P>);
  }

  const CacheThread& at_;
  ReplayShared& shared_;
  std::uint32_t* const live_words_;
  const Guards guards_;
  Slot* const states_;              // [slot]
  std::uint32_t* const positions_;  // [slot]
  Tokens tokens_;
  typename P::Params params_{};
  ReplayProgress progress_;
  ReplayAdmission now_, next_;
  int parity_ = 0;
};

}  // namespace kvlab::kernels
