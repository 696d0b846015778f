#include "engine/cuda/cache/pair_slots.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvlab {

PairSlots::PairSlots(const ModelConfig& config, std::span<const ResolvedConfig> caches,
                     std::uint32_t most_tokens)
    : kv_heads_(config.kv_heads), caches_(caches.begin(), caches.end()) {
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    for (std::size_t pair = 0; pair < pairs(); ++pair) {
      guards(layer, pair);  // refuses what does not fit
      std::uint32_t slots = capacity(layer, pair);
      if (most_tokens > 0) slots = std::min(slots, most_tokens);
      if (slots >= std::uint32_t{1} << 31)
        throw std::invalid_argument("a cache without a budget needs a length; give one of them");
      first_slots_.push_back(total_);
      total_ += slots;
      most_ = std::max(most_, static_cast<int>(slots));
    }
}

std::uint32_t PairSlots::budget(std::uint32_t layer, std::size_t pair) const {
  return caches_[pair / kv_heads_].budget_of(layer, static_cast<std::uint32_t>(pair % kv_heads_));
}

std::uint32_t PairSlots::capacity(std::uint32_t layer, std::size_t pair) const {
  const std::uint32_t tokens = budget(layer, pair);
  const Modifiers& own = modifiers(pair);
  if (tokens == kNoBudget || own.once) return kNoBudget;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(own.capacity(tokens, 1), kNoBudget));
}

Guards PairSlots::guards(std::uint32_t layer, std::size_t pair) const {
  const std::uint32_t tokens = budget(layer, pair);
  return tokens == kNoBudget ? Guards{} : resolve_guards(caches_[pair / kv_heads_].policy, tokens);
}

std::uint32_t PairSlots::older(std::uint32_t layer, std::size_t pair, std::uint32_t fed) const {
  const std::uint32_t tokens = budget(layer, pair);
  return tokens == kNoBudget ? fed : std::min(fed, tokens - 1);
}

}  // namespace kvlab
