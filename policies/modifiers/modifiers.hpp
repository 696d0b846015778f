// What modifies the rule of eviction: when tokens are evicted, what a group of query heads gives,
// and what becomes of ranks before tokens are ordered. They belong to the rule and apply to any
// policy.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <cstdint>

namespace kvlab {

/// Without a modifier: as the members are initialised.
struct Modifiers {
  enum class Pool { mean, max };
  enum class Scope { head, layer };
  enum class Group { sum, max };

  /// Tokens are evicted only when at least budget - 1 + `every` tokens are live, and then down to
  /// budget - 1.
  std::uint32_t every = 1;
  /// Tokens are evicted only right after a prompt segment; decoded tokens stay.
  bool once = false;
  /// A rank becomes the mean or maximum of those of the live tokens at most so many tokens away by
  /// age; see smooths().
  std::uint32_t smooth = 0;
  Pool pool = Pool::mean;
  /// layer: a token's rank is the sum, as numbers in head order, over the layer's KV heads, which
  /// keep one set.
  Scope scope = Scope::head;
  /// What the query heads of a group give a token in one query: the sum of their masses, or the
  /// largest.
  Group group = Group::sum;

  constexpr bool operator==(const Modifiers&) const = default;

  /// How many of `live` tokens are evicted before the next append; budgets are below 2^31.
  /// `after_prompt`: the last append ended a prompt segment.
  constexpr std::uint32_t surplus(std::uint32_t live, std::uint32_t budget,
                                  bool after_prompt) const {
    const std::uint32_t kept = budget - 1;
    if (once && !after_prompt) return 0;
    return live < std::uint64_t{kept} + every ? 0 : live - kept;
  }
  /// Whether room for a decoded token is made by the step itself; else by a compaction before it.
  constexpr bool steps_evict() const { return every == 1 && !once && scope == Scope::head; }
  /// At how many live tokens tokens are evicted; the largest number: never.
  constexpr std::uint32_t evict_at(std::uint32_t budget) const {
    const std::uint64_t live = std::uint64_t{budget} - 1 + every;
    return live < ~std::uint32_t{0} ? static_cast<std::uint32_t>(live) : ~std::uint32_t{0};
  }
  /// Whether ranks are smoothed where tokens are evicted now: in a burst, and after a prompt
  /// segment.
  constexpr bool smooths(bool after_prompt) const {
    return smooth > 0 && (every > 1 || once || after_prompt);
  }
  /// How many tokens may be live at most, where at most `appended` enter together; not under
  /// `once`, which has no bound.
  constexpr std::uint64_t capacity(std::uint32_t budget, std::uint64_t appended) const {
    return std::uint64_t{budget - 1} + every - 1 + appended;
  }
};

}  // namespace kvlab
