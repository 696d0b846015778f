// Which rung of a ladder each token of a cache is on: who steps down, and which copy it is of.
#pragma once

#include "kernels/device/leaving.cuh"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay/block.cuh"

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
  const std::uint8_t* rungs;       // [slot]
  const std::uint32_t* positions;  // [slot]
  std::uint64_t of_rung;           ///< eight bits each
  std::uint32_t exact_from;

  __device__ int operator()(std::uint32_t slot) const {
    return positions[slot] >= exact_from ? 0 : static_cast<int>(of_rung >> 8 * rungs[slot] & 255);
  }
};

/// The rungs of a cache without a ladder.
struct NoRungs {
  __device__ NoRungs(const ReplayPlace&, std::uint32_t*, std::uint8_t*) {}
};

/// Nobody else writes what is shared: each method's callers are all threads of the block, and what
/// it wrote is there behind the next barrier.
class ReplayRungs {
 public:
  /// `words`: of shared memory, for the bits of each rung's live positions; `of_slot`: [slot].
  __device__ ReplayRungs(const ReplayPlace& at, std::uint32_t* words, std::uint8_t* of_slot)
      : at_(at),
        shared_(shared()),
        rungs_(at.args.rungs + at.rule.first_rung),
        count_(static_cast<int>(at.rule.rungs)),
        words_(words),
        of_slot_(of_slot) {
    for (int r = 0; r < count_; ++r) copies_ |= std::uint64_t{rungs_[r].copy} << 8 * r;
  }

  __device__ int count() const { return count_; }
  __device__ std::uint8_t* of_slot() const { return of_slot_; }
  __device__ std::uint64_t copies() const { return copies_; }
  __device__ std::uint32_t on(int rung) const { return shared_.counts[rung]; }
  __device__ std::uint32_t slots(int rung) const { return rungs_[rung].slots; }

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

  /// From what is known of each slot.
  __device__ void find(const std::uint32_t* positions, std::uint32_t live) {
    const int words = at_.args.samples.words;
    if (at_.thread < kMostReplayRungs) shared_.counts[at_.thread] = 0;
    for (int w = static_cast<int>(at_.thread); w < count_ * words;
         w += static_cast<int>(at_.threads))
      words_[w] = 0;
    __syncthreads();
    for (std::uint32_t i = at_.thread; i - at_.lane < live; i += at_.threads) {
      const int rung = i < live ? of_slot_[i] : kMostReplayRungs;
      if (i < live) atomicOr(word_of(rung, positions[i]), bit_of(positions[i]));
      for (int r = 0; r < count_; ++r) {
        const int here = __popc(__ballot_sync(~0u, rung == r));
        if (at_.lane == 0 && here > 0) atomicAdd(shared_.counts + r, here);
      }
    }
    __syncthreads();
  }

  // One thread.

  __device__ void admit(std::uint32_t position) {
    ++shared_.counts[0];
    *word_of(0, position) |= bit_of(position);
  }
  /// From the last rung.
  __device__ void leave(std::uint32_t position) {
    --shared_.counts[count_ - 1];
    *word_of(count_ - 1, position) &= ~bit_of(position);
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

  /// The live words of a copy's tokens before `exact_from`, or of copy 0 with those after it.
  __device__ std::uint32_t word(int copy, std::uint32_t w, std::uint32_t exact_from) const {
    std::uint32_t bits = 0;
    const std::uint32_t coded = exact_from <= w * 32        ? 0
                                : exact_from >= w * 32 + 32 ? ~0u
                                                            : (1u << exact_from % 32) - 1;
    for (int r = 0; r < count_; ++r) {
      const std::uint32_t own = words_[r * at_.args.samples.words + w];
      if (static_cast<int>(copies_ >> 8 * r & 255) == copy) bits |= own & coded;
      if (copy == 0) bits |= own & ~coded;
    }
    return bits;
  }

  __device__ static LadderShared& shared() {
    __shared__ LadderShared shared;
    return shared;
  }

 private:
  /// Before anybody goes; the last has where nobody is to leave yet.
  __device__ bool has_room(int rung, bool leaving) const {
    return (!leaving && rung + 1 == count_) || on(rung) < slots(rung);
  }
  __device__ std::uint32_t* word_of(int rung, std::uint32_t position) const {
    return words_ + rung * at_.args.samples.words + position / 32;
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

  const ReplayPlace& at_;
  LadderShared& shared_;
  const ReplayRung* rungs_;
  int count_;
  std::uint32_t* words_;  // [rung, word]
  std::uint8_t* of_slot_;
  std::uint64_t copies_ = 0;
};

}  // namespace kvlab::kernels
