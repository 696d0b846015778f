// Modifiers of the eviction rule: when tokens are evicted, how the query heads of a group are
// combined, and how ranks are processed before tokens are ordered. They apply to any policy.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

#include "policies/rule/live_tokens.hpp"

namespace kvlab {

/// With the initial values, no modifier is set.
struct Modifiers {
  enum class Pool { mean, max };
  enum class Scope { head, layer };
  enum class Group { sum, max };

  /// Tokens are evicted only when at least budget - 1 + `every` tokens are live, and then down to
  /// budget - 1.
  std::uint32_t every = 1;
  /// Tokens are evicted only right after a prompt segment; decoded tokens are kept.
  bool once = false;
  /// If not 0, a rank is replaced by the mean or maximum over the live tokens that are at most
  /// `smooth` places away in the order of age. See smooths().
  std::uint32_t smooth = 0;
  Pool pool = Pool::mean;
  /// layer: a token's rank is the sum of its numeric ranks in all KV heads of the layer, added in
  /// the order of the heads. So all heads keep the same set of tokens.
  Scope scope = Scope::head;
  /// How the masses that a group's query heads give a token in one query are combined: by their
  /// sum, or by the largest.
  Group group = Group::sum;

  constexpr bool operator==(const Modifiers&) const = default;

  /// Number of tokens to evict before the next append if `live` tokens are live. `budget` is below
  /// 2^31, or 2^32 - 1 for no budget. `after_prompt`: whether the last append ended a prompt
  /// segment.
  constexpr std::uint32_t surplus(std::uint32_t live, std::uint32_t budget,
                                  bool after_prompt) const {
    return once && !after_prompt ? 0 : tokens_to_evict(live, budget, evict_at(budget));
  }
  /// Whether each decoding step evicts its own victim. If not, a compaction before the step evicts
  /// tokens.
  constexpr bool steps_evict() const { return every == 1 && !once && scope == Scope::head; }
  /// Number of live tokens at which eviction starts. 2^32 - 1: it never starts.
  constexpr std::uint32_t evict_at(std::uint32_t budget) const {
    const std::uint64_t live = std::uint64_t{budget} - 1 + every;
    return live < ~std::uint32_t{0} ? static_cast<std::uint32_t>(live) : ~std::uint32_t{0};
  }
  /// Whether ranks are smoothed if tokens are evicted now. This is so if many tokens are evicted at
  /// once (`every` above 1, or `once`) and after a prompt segment.
  constexpr bool smooths(bool after_prompt) const {
    return smooth > 0 && (every > 1 || once || after_prompt);
  }
  /// Maximum number of live tokens if at most `appended` tokens are appended together. Not valid
  /// with `once`, under which the number is unbounded.
  constexpr std::uint64_t capacity(std::uint32_t budget, std::uint64_t appended) const {
    return std::uint64_t{budget - 1} + every - 1 + appended;
  }
};

}  // namespace kvlab
