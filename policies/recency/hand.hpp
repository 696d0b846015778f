// The hand that CLOCK and SIEVE move over the tokens.
//
// The tokens stand in a circle, in the order of `place`. The hand moves along it. It clears the
// mark of each marked token that it passes, and evicts the first token without a mark. No token
// stores where the hand is. Instead, each token stores whether the hand has passed it in this lap.
// So the hand finds its next victim in this order: unmarked tokens ahead of it, unmarked tokens
// that it has passed (in the next lap), marked tokens ahead of it, and marked tokens that it has
// passed.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

#include "policies/order_hooks.hpp"

namespace kvlab {

struct Hand {
  std::uint64_t place;
  std::uint32_t appended_at;  // Step::now of the append
  std::uint8_t is_marked, is_passed;

  /// Number of bits of each of the two positions in `place`. A rank then has 2 + 2 * 27 bits, so
  /// the ranks of 256 KV heads can be added without overflow (scope=layer). Positions from 2^27 - 1
  /// on count as equal.
  static constexpr int kBits = 27;
  static constexpr std::uint64_t cap(std::uint32_t position) {
    constexpr std::uint64_t kMax = (std::uint64_t{1} << kBits) - 1;
    return position < kMax ? position : kMax;
  }
  /// A new token. Its place comes after those of all tokens that were appended before.
  static constexpr Hand newest(Token token, const Step& step) {
    return {cap(step.now) << kBits | cap(token.position), step.now, 0, 0};
  }
  /// Marks a requested token, unless the request comes from the append to which the token belongs.
  constexpr void observe(const Observation& seen, const Step& step) {
    if (seen.requests > 0 && appended_at != step.now) is_marked = 1;
  }
  constexpr std::uint64_t rank() const {
    const std::uint64_t order = 2u * is_marked + is_passed;
    return order << 2 * kBits | place;
  }
  /// Updates this token when the hand moves on to the victim, whose rank is `victim`. On its way
  /// the hand may pass unmarked tokens: those that are protected, and so not evicted.
  constexpr void move_to(std::uint64_t victim) {
    const std::uint64_t order = victim >> 2 * kBits;
    const bool before = place < place_of(victim), was_passed = is_passed == 1;
    const bool new_lap = order == 1 || order == 3;  // the hand had already passed the victim
    const bool over = new_lap ? !was_passed || before : !was_passed && before;
    // To reach a marked victim (order 2 or 3), the hand passes every token and clears all marks.
    if (order >= 2 || over) is_marked = 0;
    is_passed = new_lap ? was_passed && before : was_passed || before;
  }
  static constexpr std::uint64_t place_of(std::uint64_t rank) {
    return rank & ((std::uint64_t{1} << 2 * kBits) - 1);
  }
};

/// The hooks that CLOCK and SIEVE share. Their hooks evicted() differ, because they put a new token
/// at different places.
struct HandPolicy {
  struct Params {};
  using Slot = Hand;

  static constexpr void append(Slot& slot, Token token, const Params&, const Step& step) {
    slot = Hand::newest(token, step);
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&,
                                const Step& step) {
    slot.observe(seen, step);
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.rank();
  }
};

}  // namespace kvlab
