// How live tokens are assigned to the tiers of a plan before the next append.
//
// The next token takes a slot of the first tier. All live tokens are handled in reverse eviction
// order, so that the token to be evicted last comes first. Each one gets a slot of the highest tier
// that has a free slot and is not above the token's present tier. Tokens that get no slot are
// evicted. A modifier may delay eviction. Until then, the first tier has extra slots for the tokens
// that are waiting to be evicted.
//
// So a tier that has more tokens than slots demotes the excess: the tokens that come first in the
// eviction order. The functions below compute this for counts and for single tokens. All executors
// use them.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"
#include "policies/rule/eviction_order.hpp"
#include "policies/rule/live_tokens.hpp"

namespace kvlab {

/// One tier of a cache: how many tokens and how many slots it has.
struct TierLoad {
  std::uint32_t tokens, slots;
};

/// Whether the first tier has no slot for the next token. Modifiers may delay demotion, and then it
/// returns false.
constexpr bool is_first_tier_full(const TierLoad& first, const Modifiers& modifiers,
                                  bool after_prompt) {
  return modifiers.surplus(first.tokens, first.slots, after_prompt) > 0;
}

/// Number of tokens beyond the budget that are waiting for eviction.
constexpr std::uint32_t waiting_tokens(std::uint32_t live, std::uint32_t budget, bool evicts) {
  return evicts ? 0 : tokens_to_evict(live, budget, budget);
}

/// Number of tokens that may stay on a tier. The first tier keeps one slot free for the next token.
constexpr std::uint32_t tier_capacity(int tier, std::uint32_t slots, std::uint32_t waiting) {
  return tier == 0 ? slots + waiting - 1 : slots;
}

/// Number of tokens that a tier demotes if it has `tokens`, including those demoted to it.
constexpr std::uint32_t tokens_to_demote(std::uint32_t tokens, std::uint32_t capacity) {
  return tokens > capacity ? tokens - capacity : 0;
}

/// Updates the number of tokens of each tier to what the assignment gives. Returns the number of
/// evicted tokens.
constexpr std::uint32_t assign_counts(TierLoad* tiers, int count, std::uint32_t waiting) {
  std::uint32_t demoted = 0;
  for (int tier = 0; tier < count; ++tier) {
    const std::uint32_t tokens = tiers[tier].tokens + demoted;
    demoted = tokens_to_demote(tokens, tier_capacity(tier, tiers[tier].slots, waiting));
    tiers[tier].tokens = tokens - demoted;
  }
  return demoted;
}

// --- At most one token of each tier is demoted ---------------------------------------------------

constexpr bool has_free_slot(const TierLoad& tier) { return tier.tokens < tier.slots; }

/// Whether the first tier is exactly full, so that the next token needs one of its slots, and no
/// other tier has more tokens than slots. Then each tier demotes at most its first victim.
constexpr bool demotes_at_most_one(const TierLoad* tiers, int count) {
  bool one = tiers[0].tokens == tiers[0].slots;
  for (int tier = 1; tier < count; ++tier) one &= tiers[tier].tokens <= tiers[tier].slots;
  return one;
}

/// The first victim of tier `from` is demoted to tier `to`. If `to` is one more than the last tier,
/// the token is evicted.
struct Demotion {
  int from, to;
};

/// Finds which tokens are demoted, if demotes_at_most_one(). Each tier demotes its first victim to
/// the next tier. A full tier that receives a token then demotes one token: its own first victim,
/// or the received token if that one comes earlier in the eviction order. Writes the demotions,
/// from the first tier down, and returns their number, at most `count`. `firsts`: the first victim
/// of each tier, or none for an empty tier; it is read only down to the first tier that has a free
/// slot.
constexpr int demotion_chain(const TierLoad* tiers, const EvictionCandidate* firsts, int count,
                             Demotion* chain) {
  int moves = 0, from = 0;
  for (int tier = 1; tier < count; ++tier) {
    const bool is_free = has_free_slot(tiers[tier]);
    if (!is_free && !(firsts[tier].key < firsts[from].key)) continue;
    chain[moves++] = {from, tier};
    if (is_free) return moves;
    from = tier;
  }
  chain[moves++] = {from, count};
  return moves;
}

}  // namespace kvlab
