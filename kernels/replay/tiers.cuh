// Tokens on tiers: the tier and the copy of each token, and which tokens are demoted.
#pragma once

#include "kernels/device/eviction_order.cuh"
#include "kernels/device/select_victims.cuh"
#include "kernels/replay/tokens.cuh"
#include "policies/rule/tier_assignment.hpp"

namespace kvlab::kernels {

struct TierShared {
  TierLoad loads[kMaxReplayTiers];
  EvictionCandidate warp_victims[kMaxReplayTiers]
                                [kReplayWarps];  ///< the first victim among each warp's slots
  EvictionCandidate firsts[kMaxReplayTiers], victim;
};

/// Eviction keys of the tokens of one tier. Tokens of other tiers get keys that sort last, so they
/// are not selected.
struct OneTierKeys {
  EvictionKeys all;
  const std::uint8_t* tiers;
  int tier;

  __device__ EvictionKey operator[](std::uint32_t i) const {
    return tiers[i] == tier ? all[i] : unselected_key();
  }
};

/// Maps a slot to the copy of its token. Tokens that are appended together are exact until their
/// append ends.
struct SlotCopies {
  static constexpr bool kQuantized = true;
  const ReplayCopies& all;
  const std::uint8_t* tiers;       // [slot]
  const std::uint32_t* positions;  // [slot]
  std::uint64_t tier_copies;       ///< the copy of each tier, eight bits per tier
  std::uint32_t exact_from;

  __device__ int operator()(std::uint32_t slot) const {
    return positions[slot] >= exact_from ? 0
                                         : static_cast<int>(tier_copies >> 8 * tiers[slot] & 255);
  }
  /// The distance in memory, in float4, from a row of copy 0 to the same row of the token's copy.
  __device__ std::int64_t row_of(std::uint32_t slot) const { return (*this)(slot)*all.rows; }
};

/// Multiplies direct exponentials by the values of the tokens' copies, and writes the sums over the
/// tokens to `to` [group, dim]. Each thread computes some elements of `to`.
template <class Copies>
__device__ __noinline__ void sum_quantized_values(const ReplayTierArgs& args, DirectValues values,
                                                  const Copies copies, float* to) {
  const ReplayShape& shape = args.shape;
  for (int n = static_cast<int>(threadIdx.x); n < shape.group * shape.head_size;
       n += static_cast<int>(blockDim.x)) {
    const int head = n / shape.head_size, d = n % shape.head_size;
    const float4* const direct = values.direct + head / 4 * args.slots.task_stride;
    float sum = 0;
    for (std::uint32_t slot = 0; slot < values.count; ++slot) {
      const int copy = copies(slot);
      const std::int64_t at = shape.vector(values.task, values.positions[slot]) + d;
      if (values.positions[slot] < values.end)
        sum = fmaf(component(direct[slot], head % 4),
                   copy == 0 ? load1(args.tensors.values, shape.type, at)
                             : load_copy(args.copies, args.copies.values, shape.type, copy, at),
                   sum);
    }
    to[n] = sum;
  }
}

/// Only this class writes TierShared. All threads of the thread block call each method, except
/// enter(). Results in shared memory are visible to all threads after the next barrier.
template <bool kShared, class T>
class TieredTokens : public ExactTokens<kShared, T> {
  using Base = ExactTokens<kShared, T>;
  using Base::at_;

 public:
  using Args = ReplayTierArgs;
  static constexpr bool kTiered = true;

  /// Bytes for the bits of the live positions on each tier.
  __device__ static std::size_t bytes_before_slots(const Args& args) {
    return bytes_of_words(args.shape) * static_cast<std::size_t>(args.max_tiers);
  }
  __device__ TieredTokens(const CacheThread& at, ReplayShared& shared, std::byte* before,
                          std::byte* rest, const std::uint32_t* positions, std::uint32_t slots)
      : Base(at, shared, before, rest, positions, slots),
        args_(static_cast<const Args&>(at.args)),
        shared_(tier_shared()),
        tiers_(args_.tiers + at.rule.first_tier),
        positions_(positions),
        count_(static_cast<int>(at.rule.tiers)),
        words_(reinterpret_cast<std::uint32_t*>(before)) {
    if constexpr (kShared)
      slot_tiers_ = reinterpret_cast<std::uint8_t*>(rest);
    else
      slot_tiers_ = args_.slot_tiers + at.first_slot;
    for (int r = 0; r < count_; ++r) copies_ |= std::uint64_t{tiers_[r].copy} << 8 * r;
  }

  __device__ int count() const { return count_; }
  __device__ std::uint8_t* slot_tiers() const { return slot_tiers_; }
  __device__ SlotCopies copies(std::uint32_t exact_from) const {
    return {args_.copies, slot_tiers_, positions_, copies_, exact_from};
  }
  __device__ const TierLoad& load(int tier) const { return shared_.loads[tier]; }

  __device__ void move_in(std::uint32_t i) {
    slot_tiers_[i] = args_.slot_tiers[at_.first_slot + i];
  }
  __device__ void move_out(std::uint32_t i) const {
    args_.slot_tiers[at_.first_slot + i] = slot_tiers_[i];
  }
  __device__ void append(std::uint32_t i, std::uint32_t) { slot_tiers_[i] = 0; }
  __device__ void move(std::uint32_t to, std::uint32_t from) {
    slot_tiers_[to] = slot_tiers_[from];
  }
  __device__ void enter(std::uint32_t position) {
    ++shared_.loads[0].tokens;
    *word_of(0, position) |= bit_of(position);
  }
  /// Removes the evicted token, which is on the last tier of the plan.
  __device__ void lose(std::uint32_t victim, std::uint32_t) {
    if (at_.thread != 0) return;
    --shared_.loads[count_ - 1].tokens;
    *word_of(count_ - 1, victim) &= ~bit_of(victim);
  }

  /// Whether the first tier has no slot for another token.
  __device__ bool is_full(const Modifiers& modifiers, bool after_prompt) const {
    return is_first_tier_full(shared_.loads[0], modifiers, after_prompt);
  }
  /// Whether each tier demotes at most one token.
  __device__ bool demotes_one() const { return demotes_at_most_one(shared_.loads, count_); }

  __device__ void find(std::uint32_t live) {
    const int words = args_.shape.words();
    if (static_cast<int>(at_.thread) < count_)
      shared_.loads[at_.thread] = {0, tiers_[at_.thread].slots};
    for (int w = static_cast<int>(at_.thread); w < count_ * words;
         w += static_cast<int>(at_.threads))
      words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i - at_.lane < live; i += at_.threads) {
      const int tier = i < live ? slot_tiers_[i] : kMaxReplayTiers;
      if (i < live) atomicOr(word_of(tier, positions_[i]), bit_of(positions_[i]));
      for (int r = 0; r < count_; ++r) {
        const int here = __popc(__ballot_sync(~0u, tier == r));
        if (at_.lane == 0 && here > 0) atomicAdd(&shared_.loads[r].tokens, here);
      }
    }
    __syncthreads();
  }

  /// Demotes the first victim of each full tier; requires demotes_one(). Returns the token to
  /// evict, which is on the last tier when the function returns, or none.
  template <int kStrip>
  __device__ EvictionCandidate demote(const EvictionKeys& keys, std::uint32_t live) {
    for (int r = 0; passes_on(r); ++r) {
      EvictionCandidate mine = EvictionCandidate::none();
      at_.template for_slots<kStrip>(live, [&](std::uint32_t i) {
        if (slot_tiers_[i] == r) mine = first_victim(mine, {keys[i], static_cast<int>(i)});
      });
      mine = warp_first_victim(mine);
      if (at_.lane == 0) shared_.warp_victims[r][at_.warp] = mine;
    }
    __syncthreads();
    if (at_.warp == 0) demote_firsts();
    __syncthreads();
    return shared_.victim;
  }

  /// See sum_quantized_values(). This is rarely needed.
  template <int kHeadGroups, class Copies>
  __device__ void sum_values(const DirectValues& values, const Copies& copies, float* to) const {
    sum_quantized_values(args_, values, copies, to);
  }

  /// Word `w` of the bits of a copy's live tokens. Tokens from position `exact_from` on all belong
  /// to copy 0.
  __device__ std::uint32_t word(int copy, std::uint32_t w, std::uint32_t exact_from) const {
    std::uint32_t bits = 0;
    const std::uint32_t quantized = exact_from <= w * 32        ? 0
                                    : exact_from >= w * 32 + 32 ? ~0u
                                                                : (1u << exact_from % 32) - 1;
    for (int r = 0; r < count_; ++r) {
      const std::uint32_t own = words_[r * args_.shape.words() + w];
      if (static_cast<int>(copies_ >> 8 * r & 255) == copy) bits |= own & quantized;
      if (copy == 0) bits |= own & ~quantized;
    }
    return bits;
  }

 private:
  __device__ static TierShared& tier_shared() {
    __shared__ TierShared shared;
    return shared;
  }
  /// Whether the tier also demotes a token when the first tier does. Call it for tiers 0, 1, … in
  /// order until it returns false, and before any token is moved.
  __device__ bool passes_on(int tier) const {
    return tier == 0 || (tier < count_ && !has_free_slot(shared_.loads[tier]));
  }
  __device__ std::uint32_t* word_of(int tier, std::uint32_t position) const {
    return words_ + tier * args_.shape.words() + position / 32;
  }
  __device__ static std::uint32_t bit_of(std::uint32_t position) { return 1u << position % 32; }

  /// Called by a warp. All lanes together find the first victim of each tier. Then one lane moves
  /// the tokens.
  __device__ void demote_firsts() {
    for (int r = 0; passes_on(r); ++r) {
      const EvictionCandidate first = warp_first_victim(
          at_.lane < at_.warps ? shared_.warp_victims[r][at_.lane] : EvictionCandidate::none());
      if (at_.lane == 0) shared_.firsts[r] = first;
    }
    __syncwarp();
    if (at_.lane != 0) return;
    shared_.victim = EvictionCandidate::none();
    Demotion chain[kMaxReplayTiers];
    const int demotions = demotion_chain(shared_.loads, shared_.firsts, count_, chain);
    for (int i = 0; i < demotions; ++i) {
      const EvictionCandidate& token = shared_.firsts[chain[i].from];
      const bool is_evicted = chain[i].to == count_;
      if (is_evicted) shared_.victim = token;
      move_to_tier(token, chain[i].from, is_evicted ? count_ - 1 : chain[i].to);
    }
  }
  __device__ void move_to_tier(const EvictionCandidate& token, int from, int to) {
    const std::uint32_t position = token.key.position;
    --shared_.loads[from].tokens, ++shared_.loads[to].tokens;
    *word_of(from, position) &= ~bit_of(position);
    *word_of(to, position) |= bit_of(position);
    slot_tiers_[token.slot] = static_cast<std::uint8_t>(to);
  }

  const Args& args_;
  TierShared& shared_;
  const ReplayTier* tiers_;
  const std::uint32_t* positions_;  // [slot]
  int count_;
  std::uint32_t* words_;  // [tier, word]
  std::uint8_t* slot_tiers_;
  std::uint64_t copies_ = 0;
};

}  // namespace kvlab::kernels
