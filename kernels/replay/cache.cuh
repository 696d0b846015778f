// The slots of one cache: which tokens are live, which slot each token has, and its policy state.
// The policy's hooks for appending, evicting and ranking are compiled into this code.
#pragma once

#include "kernels/replay/cache_positions.cuh"
#include "kernels/replay/ranks.cuh"
#include "kernels/replay/tiers.cuh"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

/// A thread handles the slots that CacheThread::for_slots() visits. If the slots fit into shared
/// memory, they stay there during the block of queries. `Tokens` is ExactTokens,
/// CachePositionTokens or TieredTokens.
template <class P, class Tokens>
class ReplayCache {
 public:
  using Slot = typename P::Slot;
  static constexpr bool kInShared = Tokens::kInShared, kHasState = !std::is_empty_v<Slot>;
  static constexpr std::uint32_t kNoPosition = ~0u;
  static constexpr int kStrip = replay_strip(Tokens::kCachePositions);
  static constexpr std::uint32_t kFeatures = P::kInfo.feature_count();

  /// `dynamic`: shared memory that holds the bits of the live positions, then the memory that
  /// `Tokens` needs before the slots, then the slots if they fit.
  __device__ ReplayCache(const CacheThread& at, ReplayShared& shared, std::byte* dynamic)
      : at_(at),
        shared_(shared),
        live_words_(reinterpret_cast<std::uint32_t*>(dynamic)),
        protected_tokens_{.sinks = at.rule.rule.sinks, .recent = at.rule.rule.recent},
        states_(kInShared ? states_in(at, dynamic) : stored_states(at)),
        positions_(kInShared ? positions_in(at, dynamic) : at.args.slots.positions + at.first_slot),
        tokens_(at, shared, dynamic + bytes_of_words(at.args.shape),
                reinterpret_cast<std::byte*>(positions_ + shared_slots(at)), positions_,
                shared_slots(at)) {
    if constexpr (!std::is_empty_v<typename P::Params>)
      params_ = *reinterpret_cast<const typename P::Params*>(at.rule.params);
    progress_ = at.args.progress[at.cache()];
    now_ = append_at(progress_.append);
    next_ = append_at(progress_.append + 1);
    move_in();
  }

  __device__ Tokens& tokens() { return tokens_; }
  __device__ const Tokens& tokens() const { return tokens_; }
  __device__ const typename P::Params& params() const { return params_; }
  /// Bits of the live positions.
  __device__ const std::uint32_t* live_words() const { return live_words_; }
  __device__ const ReplayAppend& now() const { return now_; }
  __device__ std::uint32_t live() const { return progress_.live; }
  __device__ const std::uint32_t* positions() const { return positions_; }
  __device__ std::uint32_t position(std::uint32_t i) const { return positions_[i]; }
  /// Whether the slot holds a token at a position up to `query`. `visible` is the number of such
  /// tokens, which are in slots [0, visible). In shared memory, the position of an empty slot is
  /// larger than that of every query.
  __device__ bool holds(std::uint32_t i, std::uint32_t query, std::uint32_t visible) const {
    return kInShared ? positions_[i] <= query : i < visible;
  }
  /// Returns a map from slots to the copies that their tokens belong to.
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

  /// Evicts to the budget before the tokens of the current append, and then appends them.
  __device__ void begin() {
    const std::uint32_t num_evicted = surplus(progress_.append);
    std::uint32_t first = progress_.live;
    if (num_evicted == 1 && now_.tokens == 1 && progress_.victim > 0) {
      first = static_cast<std::uint32_t>(progress_.victim - 1);
      tokens_.lose(progress_.victim_position, progress_.live);
      if (at_.thread == 0)
        live_words_[progress_.victim_position / 32] &= ~(1u << progress_.victim_position % 32);
    } else {
      if constexpr (Tokens::kTiered)
        assign_tiers(num_evicted);
      else if (num_evicted > 0)
        evict_many(num_evicted);
      tokens_.move_all();
      first = progress_.live;
      progress_.live += now_.tokens;
    }
    progress_.evictions += num_evicted;
    progress_.max_live = max(progress_.max_live, progress_.live);
    progress_.victim = 0;
    if (now_.tokens == 1)
      append_one(first);
    else
      append_many(first);
    if constexpr (Tokens::kTiered) __syncthreads();
  }

  /// Ends the current append.
  __device__ void end() {
    ++progress_.append;
    now_ = next_;
    if (next_.tokens > 0) next_ = append_at(progress_.append + 1);
  }

  /// Whether the next append has one token and evicts exactly one token, so that this victim can be
  /// chosen now, by rank alone.
  __device__ bool ranks_next() const {
    const std::uint32_t next = progress_.append + 1;
    const bool evicts = next_.tokens == 1 && surplus(next) == 1;
    if constexpr (Tokens::kTiered) {
      if (next_.tokens != 1 || !needs_eviction(next) || !tokens_.demotes_one()) return false;
    } else if (!evicts) {
      return false;
    }
    return !smooths(next) && !at_.args.layer_heads;
  }
  /// Number of unprotected positions when position `now` is appended. These positions begin after
  /// the sinks.
  __device__ std::uint32_t num_unprotected(std::uint32_t now) const {
    return protected_tokens_.num_unprotected(now);
  }
  /// Makes the token in slot `i` an eviction candidate if it is unprotected, that is, if its
  /// position is one of the first `unprotected` positions after the sinks. A full cache has at
  /// least one such token: its budget has room for the sinks and the recent tokens, and one of
  /// these recent tokens is not in the cache yet, because it is appended next.
  __device__ void rank(EvictionCandidate& first, std::uint32_t i, const Slot& own,
                       const Step& ranking, std::uint32_t unprotected) const {
    const std::uint32_t position = positions_[i];
    if (position - protected_tokens_.sinks < unprotected)
      first = first_victim(
          first, {{0, rank_key(P::rank(own, token(position), params_, ranking)), position},
                  static_cast<int>(i)});
  }
  /// Chooses the first victim among the candidates of all threads as the token that the next append
  /// evicts.
  __device__ void choose(const EvictionCandidate& mine) {
    parity_ ^= 1;
    const EvictionCandidate first = block_first_victim<true>(mine, shared_.first[parity_]);
    progress_.victim = first.slot + 1;
    progress_.victim_position = first.key.position;
  }

  /// Like choose(), for a tier plan: also demotes the first victim of each full tier.
  __device__ void demote(std::uint32_t now) {
    const Step ranking = step_at(now, 0);
    std::uint64_t* const ranks = at_.args.slots.ranks + at_.first_slot;
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      ranks[i] = rank_key(P::rank(state(i), token(positions_[i]), params_, ranking));
    });
    const EvictionCandidate first = tokens_.template demote<kStrip>(
        {ranks, positions_, protected_tokens_, now}, progress_.live);
    progress_.victim = first.slot + 1;  // 0: none
    progress_.victim_position = first.key.position;
  }

  /// Copies the bits of the live positions from `first` on to words [0, tokens / 32]. The bits of
  /// earlier positions become zero.
  __device__ void copy_live(std::uint32_t* words, std::uint32_t tokens, std::uint32_t first) const {
    for (std::uint32_t w = at_.thread; w * 32 < tokens; w += at_.threads) {
      const std::uint32_t before = first > w * 32 ? min(first - w * 32, 32u) : 0;
      words[w] = before < 32 ? live_words_[w] >> before << before : 0;
    }
  }
  /// Like copy_live(), for all live positions whose tokens belong to copy `copy`.
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
    progress_.gone = tokens_.evicted_end();
    if (at_.thread == 0) at_.args.progress[at_.cache()] = progress_;
  }

 private:
  __device__ static std::uint32_t shared_slots(const CacheThread& at) {
    return whole_strips(at.args.max_slots, Tokens::kCachePositions);
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
  /// Tokens from this position on are exact, because tokens that are appended together are
  /// quantized only when their append ends.
  __device__ std::uint32_t exact_from() const { return now_.tokens > 1 ? now_.first : ~0u; }
  /// A token with its features. The token must be live.
  __device__ Token token(std::uint32_t position) const {
    Token token{position};
#pragma unroll
    for (std::uint32_t c = 0; c < kFeatures; ++c)
      token.feature[c] = at_.rule.features[std::int64_t{position} * kFeatures + c];
    return token;
  }
  __device__ ReplayAppend append_at(std::uint32_t index) const { return at_.rule.appends[index]; }
  /// Whether the append before append `index` ended a prompt segment. False if the rule does not
  /// depend on that.
  __device__ bool is_after_prompt(std::uint32_t index) const {
    return at_.rule.looks_back && index > 0 && append_at(index - 1).ends_prompt;
  }
  /// The number of tokens to evict before append `index`.
  __device__ std::uint32_t surplus(std::uint32_t index) const {
    const std::uint32_t count =
        tokens_to_evict(progress_.live, at_.rule.rule.budget, at_.rule.evict_at);
    const bool is_withheld =
        count > 0 && at_.rule.looks_back && at_.rule.modifiers.once && !is_after_prompt(index);
    return is_withheld ? 0 : count;
  }
  /// Whether a tier plan has to evict or demote tokens before append `index`.
  __device__ bool needs_eviction(std::uint32_t index) const {
    return surplus(index) > 0 || (at_.rule.evict_at != ~0u &&
                                  tokens_.is_full(at_.rule.modifiers, is_after_prompt(index)));
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
  /// Marks slots [first, end) as empty.
  __device__ void empty(std::uint32_t first, std::uint32_t end) {
    if constexpr (kInShared)
      for (std::uint32_t i = first + at_.thread; i < end; i += at_.threads)
        positions_[i] = kNoPosition;
  }
  /// Sets the bits of the live positions.
  __device__ void mark_live() {
    const auto words = static_cast<std::uint32_t>(at_.args.shape.words());
    for (std::uint32_t w = at_.thread; w < words; w += at_.threads) live_words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < progress_.live; i += at_.threads)
      atomicOr(live_words_ + positions_[i] / 32, 1u << positions_[i] % 32);
    __syncthreads();
    tokens_.find(progress_.live);
  }

  __device__ void append_one(std::uint32_t slot) {
    if (at_.has_slot<kStrip>(slot)) append(slot, now_.first, step_at(now_.first, 1));
    if (at_.thread != 0) return;
    live_words_[now_.first / 32] |= 1u << now_.first % 32;
    tokens_.enter(now_.first);
  }
  __device__ void append_many(std::uint32_t first) {
    const Step appends = step_at(now_.first, now_.tokens);
    at_.template for_slots<kStrip>(progress_.live, [&](std::uint32_t i) {
      if (i >= first) {
        const std::uint32_t position = now_.first + (i - first);
        append(i, position, appends);
        atomicOr(live_words_ + position / 32, 1u << position % 32);
      }
      if (P::kInfo.needs != Needs::nothing) at_.args.slots.seen[at_.first_slot + i] = {};
    });
    if constexpr (Tokens::kTiered) __syncthreads();
    tokens_.find(progress_.live);
  }
  __device__ void append(std::uint32_t i, std::uint32_t position, const Step& appends) {
    positions_[i] = position;
    tokens_.append(i, position);
    Slot state;
    P::append(state, token(position), params_, appends);
    put(i, state);
  }

  /// The eviction keys of all tokens, at the time when the current append begins.
  __device__ EvictionKeys eviction_keys() {
    const std::uint32_t live = progress_.live;
    const Step ranking = step_at(now_.first, 0);
    std::uint64_t* const ranks = at_.args.slots.ranks + at_.first_slot;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
      ranks[i] = rank_key(P::rank(state(i), token(positions_[i]), params_, ranking));
    if (at_.thread == 0) shared_.moves = shared_.gone = 0;
    __syncthreads();
    if (at_.args.layer_heads)
      sum_layer_ranks(at_.args, at_.task, at_.rule.first_slot, progress_.live, kRankType<P>);
    if (smooths(progress_.append)) smooth(ranks);
    return {ranks, positions_, protected_tokens_, now_.first};
  }

  __device__ void evict_many(std::uint32_t num_evicted) {
    const EvictionKeys keys = eviction_keys();
    const bool all = num_evicted == progress_.live;
    EvictionThreshold threshold{};
    if (!all) threshold = select_victims(shared_.selection, keys, progress_.live, num_evicted);
    take_out(num_evicted, [&](std::uint32_t i) { return !all && !threshold.evicts(keys[i]); });
  }

  /// For tier plans, evicts to the budget: demotes the first victims of each tier that has more
  /// tokens than slots. Victims of the last tier are evicted.
  __device__ void assign_tiers(std::uint32_t num_evicted) {
    const bool makes = needs_eviction(progress_.append);
    __syncthreads();
    if (!makes) return;
    const EvictionKeys keys = eviction_keys();
    const std::uint32_t live = progress_.live,
                        waiting = waiting_tokens(live, at_.rule.rule.budget, num_evicted > 0);
    std::uint32_t over = 0;
    for (int r = 0; r < tokens_.count(); ++r) {
      const TierLoad& tier = tokens_.load(r);
      const std::uint32_t here = tier.tokens + over;
      over = tokens_to_demote(here, tier_capacity(r, tier.slots, waiting));
      if (over == 0) continue;
      const OneTierKeys own{keys, tokens_.slot_tiers(), r};
      const bool all = over == here, last = r + 1 == tokens_.count();
      EvictionThreshold threshold{};
      if (!all) threshold = select_victims(shared_.selection, own, live, over);
      const auto goes = [&](std::uint32_t i) {
        return tokens_.slot_tiers()[i] == r && (all || threshold.evicts(own[i]));
      };
      if (last) return take_out(over, [&](std::uint32_t i) { return !goes(i); });
      for (std::uint32_t i = at_.thread; i < live; i += at_.threads)
        if (goes(i)) tokens_.slot_tiers()[i] = static_cast<std::uint8_t>(r + 1);
      __syncthreads();
    }
    __syncthreads();  // other threads may still read counts that find() clears
    tokens_.find(live);
  }

  /// Removes the tokens for which stays(slot) is false.
  template <class Stays>
  __device__ void take_out(std::uint32_t num_evicted, Stays stays) {
    const std::uint32_t live = progress_.live, kept = live - num_evicted;
    const ReplaySlots& slots = at_.args.slots;
    std::uint32_t *const holes = slots.holes + at_.first_slot, *const fillers =
                                                                   slots.fillers + at_.first_slot;
    progress_.live = kept;
    tokens_.lose_many(live, stays);
    number_kept_slots(shared_.selection, live, stays,
                      [&](std::uint32_t i, bool here, std::uint32_t before) {
                        if (i < kept && !here) holes[i - before] = i;
                      });
    // All kept tokens have to be in slots [0, kept). The number of kept tokens in later slots
    // equals the number of evicted tokens in slots [0, kept), so each of the former moves to the
    // slot of one of the latter.
    number_kept_slots(shared_.selection, live, stays,
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

  /// Smooths the ranks. Uses the observations as scratch memory, because they are not needed
  /// between two appends.
  __device__ void smooth(std::uint64_t* ranks) const {
    const ReplaySlots& slots = at_.args.slots;
    smooth_ranks({ranks, positions_, live_words_, progress_.live, slots.seen + at_.first_slot,
                  slots.fillers + at_.first_slot},
                 at_.rule.modifiers, kRankType<P>);
  }

  const CacheThread& at_;
  ReplayShared& shared_;
  std::uint32_t* const live_words_;
  const ProtectedTokens protected_tokens_;
  Slot* const states_;              // [slot]
  std::uint32_t* const positions_;  // [slot]
  Tokens tokens_;
  typename P::Params params_{};
  ReplayProgress progress_;
  ReplayAppend now_, next_;
  int parity_ = 0;
};

}  // namespace kvlab::kernels
