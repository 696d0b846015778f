#include "policies/modifiers/ranks.hpp"

#include <algorithm>
#include <stdexcept>

#include "policies/aged_set.hpp"
#include "policies/budgets/layer_budgets.hpp"
#include "policies/modifiers/pooled_rank.hpp"

namespace kvlab {
namespace {

__extension__ using Wide = unsigned __int128;  // holds the sum of 2^32 ranks

void smooth_by_mean(std::vector<std::uint64_t>& ranks, std::size_t radius) {
  const std::size_t count = ranks.size();
  std::vector<Wide> sums(count + 1);  // sums[i]: sum of the first i ranks
  for (std::size_t i = 0; i < count; ++i) sums[i + 1] = sums[i] + ranks[i];
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t older = std::min(i, radius), younger = std::min(count - 1 - i, radius);
    const Wide sum = sums[i + 1 + younger] - sums[i - older];
    ranks[i] = static_cast<std::uint64_t>(sum / (older + 1 + younger));
  }
}

void smooth_doubles_by_mean(std::vector<std::uint64_t>& ranks, std::size_t radius) {
  const std::vector<std::uint64_t> before = ranks;
  for (std::size_t i = 0; i < before.size(); ++i) {
    PooledRank pooled(Modifiers::Pool::mean, RankType::real);
    const std::size_t end = std::min(i + radius + 1, before.size());
    for (std::size_t j = i - std::min(i, radius); j < end; ++j) pooled.take(before[j]);
    ranks[i] = pooled.value();
  }
}

void smooth_by_max(std::vector<std::uint64_t>& ranks, std::size_t radius) {
  const std::vector<std::uint64_t> before = ranks;
  const std::size_t count = ranks.size();
  // ages in the window whose rank is higher than the ranks of all younger tokens in it
  std::vector<std::size_t> falling;
  std::size_t first = 0, next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (; next < std::min(count, i + radius + 1); ++next) {
      while (falling.size() > first && before[falling.back()] <= before[next]) falling.pop_back();
      falling.push_back(next);
    }
    while (falling[first] + radius < i) ++first;
    ranks[i] = before[falling[first]];
  }
}

}  // namespace

void smooth_ranks(Ranks& ranks, std::uint32_t radius, Modifiers::Pool pool) {
  const std::size_t reach = std::min<std::size_t>(radius, ranks.keys.size());
  if (pool == Modifiers::Pool::max)
    smooth_by_max(ranks.keys, reach);
  else if (ranks.type == RankType::real)
    smooth_doubles_by_mean(ranks.keys, reach);
  else
    smooth_by_mean(ranks.keys, reach);
}

const Ranks& LayerRanks::at(std::uint32_t now) {
  if (now_ == now) return sums_;
  now_ = now;
  sums_ = heads_.front()->ranks(now);
  for (const AgedSet* const head : std::span(heads_).subspan(1)) {
    if (!std::ranges::equal(head->positions(), heads_.front()->positions()))
      throw std::logic_error("scope=layer: the KV heads of a layer hold different tokens");
    const Ranks own = head->ranks(now);
    if (own.type != sums_.type)
      throw std::invalid_argument(
          "scope=layer: one KV head ranks by integers and another by floats; give floats in both");
    std::ranges::transform(sums_.keys, own.keys, sums_.keys.begin(),
                           [&](auto a, auto b) { return rank_sum(own.type, a, b); });
  }
  return sums_;
}

void share_ranks(std::span<AgedSet* const> heads) {
  const std::vector<const AgedSet*> all(heads.begin(), heads.end());
  if (heads.front()->shares_slots()) {
    const LayerBudgets* const before = heads.front()->layer_budgets();
    const auto budgets = before ? std::make_shared<LayerBudgets>(*before, all)
                                : std::make_shared<LayerBudgets>(all, heads.front()->budget());
    for (AgedSet* const head : heads) head->share(budgets);
  }
  if (heads.front()->modifiers().scope != Modifiers::Scope::layer) return;
  const auto ranks = std::make_shared<LayerRanks>(all);
  for (AgedSet* const head : heads) head->share(ranks);
}

}  // namespace kvlab
