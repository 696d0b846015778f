// Ada-KV: after a prompt, the KV heads of a layer share their slots.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policies/rule/eviction_order.hpp"

namespace kvlab {

class AgedSet;

/// Computes the budgets of a layer's KV heads (Feng et al. 2024, Ada-KV, algorithm 1, with its
/// safeguard of 20%). `heads` are the eviction keys of each head's live tokens. The layer keeps the
/// same number of tokens as if each head had the budget `mean`. It keeps the tokens that come last
/// in the eviction order of all heads together, except that each head's budget is at least a
/// fifth of `mean`. Returns `mean` for all heads if no token has to be evicted.
std::vector<std::uint32_t> ada_budgets(std::span<const std::vector<EvictionKey>> heads,
                                       std::uint32_t mean);

/// The largest budget that ada_budgets() can give one of `heads` KV heads.
std::uint32_t max_of_ada(std::uint32_t mean, std::uint32_t heads);

/// The state that the caches of one sequence and layer share with `ada()`. Before any of them
/// appends more tokens, all of them evict to their budgets, one after another.
class LayerBudgets {
 public:
  /// Stores pointers to the caches, so these must not move.
  LayerBudgets(std::vector<const AgedSet*> heads, std::uint32_t mean)
      : heads_(std::move(heads)), mean_(mean) {}

  /// Makes the state for copies of the caches of `other`. `heads`: these copies, in the same order.
  LayerBudgets(const LayerBudgets& other, std::vector<const AgedSet*> heads) : LayerBudgets(other) {
    heads_ = std::move(heads);
  }

  /// The budget of one cache before position `now` is appended. The first call for a value of `now`
  /// computes the budgets of all caches, so it must come before any of them evicts. Later calls
  /// with the same value return these budgets.
  std::uint32_t budget(const AgedSet& head, std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::uint32_t mean_;
  std::optional<std::uint32_t> now_;
  std::vector<std::uint32_t> budgets_;
};

}  // namespace kvlab
