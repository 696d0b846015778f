// Tokens on a ladder: which rung each is on, who steps down, and which copy it is of.
#pragma once

#include "kernels/device/leaving.cuh"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay/tokens.cuh"

namespace kvlab::kernels {

struct LadderShared {
  std::uint32_t counts[kMostReplayRungs];  ///< tokens
  Leaving firsts[kMostReplayRungs][kReplayWarps], leaves;
};

/// The tokens of one rung; the others come last.
struct OneRungKeys {
  LeavingKeys all;
  const std::uint8_t* rungs;
  int rung;

  __device__ LeavingKey operator[](std::uint32_t i) const {
    return rungs[i] == rung ? all[i] : LeavingKey{kLeavingBins - 1, ~std::uint64_t{0}, ~0u};
  }
};

/// Which copy a slot's token is of: what an admission of several tokens brings is exact until it
/// ends.
struct SlotCopies {
  static constexpr bool kCoded = true;
  const ReplayCopies& all;
  const std::uint8_t* rungs;       // [slot]
  const std::uint32_t* positions;  // [slot]
  std::uint64_t of_rung;           ///< eight bits each
  std::uint32_t exact_from;

  __device__ int operator()(std::uint32_t slot) const {
    return positions[slot] >= exact_from ? 0 : static_cast<int>(of_rung >> 8 * rungs[slot] & 255);
  }
  /// Where its row is, from the exact one on.
  __device__ std::int64_t row_of(std::uint32_t slot) const { return (*this)(slot)*all.rows; }
};

/// Direct exponentials by values, of copies or exact, to `to` [group, dim].
template <class Copies>
__device__ __noinline__ void sum_coded_values(const ReplayLadderArgs& args, DirectValues of,
                                              const Copies copies, float* to) {
  const ReplayShape& shape = args.shape;
  for (int n = static_cast<int>(threadIdx.x); n < shape.group * shape.head_size;
       n += static_cast<int>(blockDim.x)) {
    const int head = n / shape.head_size, d = n % shape.head_size;
    const float4* const direct = of.direct + head / 4 * args.slots.of_unit;
    float sum = 0;
    for (std::uint32_t slot = 0; slot < of.count; ++slot) {
      const int copy = copies(slot);
      const std::int64_t at = shape.vector(of.unit, of.positions[slot]) + d;
      if (of.positions[slot] < of.end)
        sum = fmaf(component(direct[slot], head % 4),
                   copy == 0 ? load1(args.tensors.values, shape.type, at)
                             : copied(args.copies, args.copies.values, shape.type, copy, at),
                   sum);
    }
    to[n] = sum;
  }
}

/// Nobody else writes what is shared: each method's callers are all threads of the thread block,
/// and what it wrote is there behind the next barrier.
template <bool kShared, class T>
class LadderTokens : public ExactTokens<kShared, T> {
  using Base = ExactTokens<kShared, T>;
  using Base::at_;

 public:
  using Args = ReplayLadderArgs;
  static constexpr bool kLadder = true;

  /// Bits of each rung's live positions.
  __device__ static std::size_t bytes_before_slots(const Args& args) {
    return bytes_of_words(args.shape) * static_cast<std::size_t>(args.most_rungs);
  }
  __device__ LadderTokens(const CacheThread& at, ReplayShared& shared, std::byte* before,
                          std::byte* behind, const std::uint32_t* positions, std::uint32_t slots)
      : Base(at, shared, before, behind, positions, slots),
        args_(static_cast<const Args&>(at.args)),
        shared_(ladder_shared()),
        rungs_(args_.rungs + at.rule.first_rung),
        positions_(positions),
        count_(static_cast<int>(at.rule.rungs)),
        words_(reinterpret_cast<std::uint32_t*>(before)) {
    if constexpr (kShared)
      of_slot_ = reinterpret_cast<std::uint8_t*>(behind);
    else
      of_slot_ = args_.slot_rungs + at.first_slot;
    for (int r = 0; r < count_; ++r) copies_ |= std::uint64_t{rungs_[r].copy} << 8 * r;
  }

  __device__ int count() const { return count_; }
  __device__ std::uint8_t* of_slot() const { return of_slot_; }
  __device__ SlotCopies copies(std::uint32_t exact_from) const {
    return {args_.copies, of_slot_, positions_, copies_, exact_from};
  }
  __device__ std::uint32_t on(int rung) const { return shared_.counts[rung]; }
  __device__ std::uint32_t slots(int rung) const { return rungs_[rung].slots; }

  __device__ void move_in(std::uint32_t i) { of_slot_[i] = args_.slot_rungs[at_.first_slot + i]; }
  __device__ void move_out(std::uint32_t i) const {
    args_.slot_rungs[at_.first_slot + i] = of_slot_[i];
  }
  __device__ void admit(std::uint32_t i, std::uint32_t) { of_slot_[i] = 0; }
  __device__ void move(std::uint32_t to, std::uint32_t from) { of_slot_[to] = of_slot_[from]; }
  __device__ void enter(std::uint32_t position) {
    ++shared_.counts[0];
    *word_of(0, position) |= bit_of(position);
  }
  /// From the last rung.
  __device__ void lose(std::uint32_t victim, std::uint32_t) {
    if (at_.thread != 0) return;
    --shared_.counts[count_ - 1];
    *word_of(count_ - 1, victim) &= ~bit_of(victim);
  }

  /// Whether the first rung has no room for another.
  __device__ bool is_full(const Modifiers& modifiers, bool after_prompt) const {
    return modifiers.surplus(on(0), slots(0), after_prompt) > 0;
  }
  /// Whether no more than one token goes down from any rung.
  __device__ bool one_goes(bool leaving) const {
    bool one = on(0) == slots(0);
    for (int r = 1; r < count_; ++r) one &= has_room(r, leaving) || on(r) <= slots(r);
    return one;
  }

  __device__ void find(std::uint32_t live) {
    const int words = args_.shape.words();
    if (at_.thread < kMostReplayRungs) shared_.counts[at_.thread] = 0;
    for (int w = static_cast<int>(at_.thread); w < count_ * words;
         w += static_cast<int>(at_.threads))
      words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i - at_.lane < live; i += at_.threads) {
      const int rung = i < live ? of_slot_[i] : kMostReplayRungs;
      if (i < live) atomicOr(word_of(rung, positions_[i]), bit_of(positions_[i]));
      for (int r = 0; r < count_; ++r) {
        const int here = __popc(__ballot_sync(~0u, rung == r));
        if (at_.lane == 0 && here > 0) atomicAdd(shared_.counts + r, here);
      }
    }
    __syncthreads();
  }

  /// Where one_goes(): at each rung the first to leave goes on, until one has room. Returns who
  /// passes the last.
  template <int kStrip>
  __device__ Leaving step_down(const LeavingKeys& keys, std::uint32_t live, bool leaving) {
    for (int r = 0; r == 0 || (r < count_ && !has_room(r, leaving)); ++r) {
      Leaving mine = Leaving::none();
      at_.template for_slots<kStrip>(live, [&](std::uint32_t i) {
        if (of_slot_[i] == r) mine = first_to_leave(mine, {keys[i], static_cast<int>(i)});
      });
      mine = warp_first_to_leave(mine);
      if (at_.lane == 0) shared_.firsts[r][at_.warp] = mine;
    }
    __syncthreads();
    if (at_.warp == 0) go_down(leaving);
    __syncthreads();
    return shared_.leaves;
  }

  /// Exponentials of tokens in codes by values, a thread for each number of `to`. Seldom called.
  template <int kQuads, class Copies>
  __device__ void sum_values(const DirectValues& of, const Copies& copies, float* to) const {
    sum_coded_values(args_, of, copies, to);
  }

  /// The live words of a copy's tokens before `exact_from`, or of copy 0 with those after it.
  __device__ std::uint32_t word(int copy, std::uint32_t w, std::uint32_t exact_from) const {
    std::uint32_t bits = 0;
    const std::uint32_t coded = exact_from <= w * 32        ? 0
                                : exact_from >= w * 32 + 32 ? ~0u
                                                            : (1u << exact_from % 32) - 1;
    for (int r = 0; r < count_; ++r) {
      const std::uint32_t own = words_[r * args_.shape.words() + w];
      if (static_cast<int>(copies_ >> 8 * r & 255) == copy) bits |= own & coded;
      if (copy == 0) bits |= own & ~coded;
    }
    return bits;
  }

 private:
  __device__ static LadderShared& ladder_shared() {
    __shared__ LadderShared shared;
    return shared;
  }
  /// Before anybody goes; the last has where nobody is to leave yet.
  __device__ bool has_room(int rung, bool leaving) const {
    return (!leaving && rung + 1 == count_) || on(rung) < slots(rung);
  }
  __device__ std::uint32_t* word_of(int rung, std::uint32_t position) const {
    return words_ + rung * args_.shape.words() + position / 32;
  }
  __device__ static std::uint32_t bit_of(std::uint32_t position) { return 1u << position % 32; }

  /// By a warp.
  __device__ Leaving first_of(int rung) const {
    return warp_first_to_leave(at_.lane < at_.warps ? shared_.firsts[rung][at_.lane]
                                                    : Leaving::none());
  }
  __device__ void go_down(bool leaving) {
    Leaving going = first_of(0);
    for (int r = 1; r < count_ && going.slot >= 0; ++r) {
      const bool stays = has_room(r, leaving);
      __syncwarp();
      if (at_.lane == 0) {
        --shared_.counts[r - 1], ++shared_.counts[r];
        *word_of(r - 1, going.key.position) &= ~bit_of(going.key.position);
        *word_of(r, going.key.position) |= bit_of(going.key.position);
        of_slot_[going.slot] = static_cast<std::uint8_t>(r);
      }
      __syncwarp();
      going = stays ? Leaving::none() : first_to_leave(going, first_of(r));
    }
    if (at_.lane == 0) shared_.leaves = going;
  }

  const Args& args_;
  LadderShared& shared_;
  const ReplayRung* rungs_;
  const std::uint32_t* positions_;  // [slot]
  int count_;
  std::uint32_t* words_;  // [rung, word]
  std::uint8_t* of_slot_;
  std::uint64_t copies_ = 0;
};

}  // namespace kvlab::kernels
