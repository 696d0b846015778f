#include "policies/modifiers/ranks.hpp"

#include <algorithm>
#include <stdexcept>

#include "policies/aged_set.hpp"
#include "policies/budgets/layer_budgets.hpp"

namespace kvlab {
namespace {

__extension__ using Wide = unsigned __int128;  // no sum of 2^32 ranks is larger

void smooth_by_mean(std::vector<std::uint64_t>& ranks, std::size_t places) {
  const std::size_t count = ranks.size();
  std::vector<Wide> sums(count + 1);  // of the first i
  for (std::size_t i = 0; i < count; ++i) sums[i + 1] = sums[i] + ranks[i];
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t older = std::min(i, places), younger = std::min(count - 1 - i, places);
    const Wide sum = sums[i + 1 + younger] - sums[i - older];
    ranks[i] = static_cast<std::uint64_t>(sum / (older + 1 + younger));
  }
}

void smooth_by_max(std::vector<std::uint64_t>& ranks, std::size_t places) {
  const std::vector<std::uint64_t> before = ranks;
  const std::size_t count = ranks.size();
  std::vector<std::size_t> falling;  // ages of the window whose ranks no younger one reaches
  std::size_t first = 0, next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (; next < std::min(count, i + places + 1); ++next) {
      while (falling.size() > first && before[falling.back()] <= before[next]) falling.pop_back();
      falling.push_back(next);
    }
    while (falling[first] + places < i) ++first;
    ranks[i] = before[falling[first]];
  }
}

}  // namespace

void smooth_ranks(std::vector<std::uint64_t>& ranks, std::uint32_t places, Modifiers::Pool pool) {
  const std::size_t reach = std::min<std::size_t>(places, ranks.size());
  if (pool == Modifiers::Pool::mean)
    smooth_by_mean(ranks, reach);
  else
    smooth_by_max(ranks, reach);
}

std::span<const std::uint64_t> LayerRanks::at(std::uint32_t now) {
  if (now_ == now) return sums_;
  now_ = now;
  sums_.assign(heads_.front()->size(), 0);
  for (const AgedSet* const head : heads_) {
    if (!std::ranges::equal(head->positions(), heads_.front()->positions()))
      throw std::logic_error("scope=layer: the KV heads of a layer hold different tokens");
    const std::vector<std::uint64_t> own = head->ranks(now);
    std::ranges::transform(sums_, own, sums_.begin(), saturating_sum);
  }
  return sums_;
}

void share_ranks(std::span<AgedSet* const> heads) {
  const std::vector<const AgedSet*> all(heads.begin(), heads.end());
  if (heads.front()->shares_slots()) {
    const auto budgets = std::make_shared<LayerBudgets>(all, heads.front()->budget());
    for (AgedSet* const head : heads) head->share(budgets);
  }
  if (heads.front()->modifiers().scope != Modifiers::Scope::layer) return;
  const auto ranks = std::make_shared<LayerRanks>(all);
  for (AgedSet* const head : heads) head->share(ranks);
}

}  // namespace kvlab
