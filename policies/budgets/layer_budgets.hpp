// Ada-KV: after a prompt the KV heads of a layer share the slots that they have together.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policies/rule.hpp"

namespace kvlab {

class AgedSet;

/// The budgets of a layer's KV heads, of which `heads` are the places of the live tokens in the
/// eviction order (Feng et al. 2024, Ada-KV, algorithm 1, with its safeguard of 20%): as many
/// tokens stay as if each had the budget `mean`, over all heads those that would are evicted last;
/// but each head keeps at least a fifth. `mean` for all where no token has to be evicted.
std::vector<std::uint32_t> ada_budgets(std::span<const std::vector<EvictionKey>> heads,
                                       std::uint32_t mean);

/// The largest of such budgets that one of `heads` can come to.
std::uint32_t max_of_ada(std::uint32_t mean, std::uint32_t heads);

/// What the caches of one sequence and layer share under `ada()`. They evict to the budget one
/// after another before any of them appends more.
class LayerBudgets {
 public:
  /// The caches, which stay where they are.
  LayerBudgets(std::vector<const AgedSet*> heads, std::uint32_t mean)
      : heads_(std::move(heads)), mean_(mean) {}

  /// For copies of those of `other`, in the same order.
  LayerBudgets(const LayerBudgets& other, std::vector<const AgedSet*> heads) : LayerBudgets(other) {
    heads_ = std::move(heads);
  }

  /// Of one of them, before the first has evicted to the budget for `now`; the others are answered
  /// as it was.
  std::uint32_t of(const AgedSet& head, std::uint32_t now);

 private:
  std::vector<const AgedSet*> heads_;
  std::uint32_t mean_;
  std::optional<std::uint32_t> now_;
  std::vector<std::uint32_t> budgets_;
};

}  // namespace kvlab
