#include "policies/budgets/layer_budgets.hpp"

#include <algorithm>

#include "policies/aged_set.hpp"

namespace kvlab {
namespace {

struct KeyOfHead {
  EvictionKey key;
  std::size_t head;

  bool operator<(const KeyOfHead& other) const {
    if (key < other.key) return true;
    return !(other.key < key) && head < other.head;
  }
};

/// The minimum number of tokens that a head keeps. It is one less than a fifth of the budget
/// (rounded up), because the budget includes the next token.
std::uint32_t min_kept(std::uint32_t mean) { return (mean + 4) / 5 - 1; }

}  // namespace

std::uint32_t max_of_ada(std::uint32_t mean, std::uint32_t heads) {
  const std::uint64_t others = heads - 1;
  const std::uint64_t limit = std::uint64_t{heads} * (mean - 1) - others * min_kept(mean) + 1;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(limit, kNoBudget - 1));
}

std::vector<std::uint32_t> ada_budgets(std::span<const std::vector<EvictionKey>> heads,
                                       std::uint32_t mean) {
  const std::size_t safe = min_kept(mean);
  std::vector<KeyOfHead> free;
  std::vector<std::uint32_t> budgets;
  std::size_t live = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    std::vector<EvictionKey> keys = heads[h];
    std::ranges::sort(keys, [](const EvictionKey& a, const EvictionKey& b) { return b < a; });
    for (std::size_t i = safe; i < keys.size(); ++i) free.push_back({keys[i], h});
    live += keys.size();
    budgets.push_back(static_cast<std::uint32_t>(keys.size()) + 1);
  }
  const std::size_t kept = heads.size() * (std::size_t{mean} - 1);
  if (live <= kept) return std::vector<std::uint32_t>(heads.size(), mean);
  const auto num_evicted = static_cast<std::ptrdiff_t>(live - kept);
  std::nth_element(free.begin(), free.begin() + num_evicted - 1, free.end());
  for (std::ptrdiff_t i = 0; i < num_evicted; ++i)
    --budgets[free[static_cast<std::size_t>(i)].head];
  return budgets;
}

std::uint32_t LayerBudgets::budget(const AgedSet& head, std::uint32_t now) {
  if (now_ != now) {
    now_ = now;
    std::vector<std::vector<EvictionKey>> keys;
    for (const AgedSet* const one : heads_) keys.push_back(one->eviction_keys(now));
    budgets_ = ada_budgets(keys, mean_);
  }
  return budgets_[static_cast<std::size_t>(std::ranges::find(heads_, &head) - heads_.begin())];
}

}  // namespace kvlab
