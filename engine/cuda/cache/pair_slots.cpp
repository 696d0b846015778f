#include "engine/cuda/cache/pair_slots.hpp"

#include <algorithm>
#include <stdexcept>

#include "policies/budgets/layer_budgets.hpp"

namespace kvlab {

PairSlots::PairSlots(const ModelConfig& config, std::span<const ResolvedConfig> caches,
                     std::uint32_t most_tokens)
    : kv_heads_(config.kv_heads),
      caches_(caches.begin(), caches.end()),
      most_tokens_(most_tokens > 0 ? most_tokens : kNoBudget) {
  for (ResolvedConfig& cache : caches_) cache.spans = config.heads().spans;
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    for (std::size_t pair = 0; pair < pairs(); ++pair) {
      if (config.rows[layer].span > 0) {
        budgets_.push_back(0);
        first_slots_.push_back(total_);
        continue;
      }
      guards(layer, pair);  // refuses what does not fit
      const std::uint32_t budget = asked(layer, pair), slots = slots_of(pair, budget);
      if (slots >= std::uint32_t{1} << 31)
        throw std::invalid_argument("a cache without a budget needs a length; give one of them");
      budgets_.push_back(budget);
      first_slots_.push_back(total_);
      total_ += slots;
      const bool shares = caches_[pair / kv_heads_].shares_slots();
      const std::uint32_t most =
          shares ? slots_of(pair, most_of_ada(budget, config.kv_heads)) : slots;
      most_ = std::max(most_, static_cast<int>(most));
    }
}

std::uint32_t PairSlots::asked(std::uint32_t layer, std::size_t pair) const {
  return caches_[pair / kv_heads_].budget_of(layer, static_cast<std::uint32_t>(pair % kv_heads_));
}

std::uint32_t PairSlots::slots_of(std::size_t pair, std::uint32_t budget) const {
  const Modifiers& own = modifiers(pair);
  if (budget == kNoBudget || own.once) return most_tokens_;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(own.capacity(budget, 1), most_tokens_));
}

std::vector<RungSlots> PairSlots::rungs(std::uint32_t layer, std::size_t pair) const {
  const auto& of_budgets = caches_[pair / kv_heads_].rungs;
  const auto own = of_budgets.find(budget(layer, pair));
  return own == of_budgets.end() ? std::vector{RungSlots{.slots = budget(layer, pair)}}
                                 : own->second;
}

/// On the first those that wait for room to be made, too.
std::uint32_t PairSlots::rows(std::size_t pair, std::span<const RungSlots> rungs,
                              std::size_t rung) const {
  return rung == 0 ? slots_of(pair, rungs[0].slots) : std::min(rungs[rung].slots, most_tokens_);
}

Guards PairSlots::guards(std::uint32_t layer, std::size_t pair) const {
  if (caches_[pair / kv_heads_].span_of(layer) > 0) return {};
  const std::uint32_t tokens = asked(layer, pair);
  return tokens == kNoBudget ? Guards{} : resolve_guards(caches_[pair / kv_heads_].policy, tokens);
}

/// As many slots as before, or fewer: budgets have the same sum, and no head has more than tokens.
void PairSlots::share(std::uint32_t layer, std::size_t sequence,
                      std::span<const std::uint32_t> budgets) {
  const std::size_t first = layer * pairs() + sequence * kv_heads_;
  std::int64_t slot = first_slots_[first];
  for (std::size_t head = 0; head < kv_heads_; ++head) {
    budgets_[first + head] = budgets[head];
    first_slots_[first + head] = slot;
    slot += slots_of(sequence * kv_heads_ + head, budgets[head]);
  }
}

std::uint32_t PairSlots::older(std::uint32_t layer, std::size_t pair, std::uint32_t fed) const {
  const std::uint32_t tokens = budget(layer, pair);
  return tokens == kNoBudget ? fed : std::min(fed, tokens - 1);
}

}  // namespace kvlab
