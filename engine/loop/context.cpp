#include "engine/loop/context.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace kvlab {

std::uint32_t longest_span(const ResolvedConfig& cache, std::uint32_t longest_prompt,
                           std::uint32_t length) {
  const Modifiers& modifiers = cache.policy.modifiers;
  if (cache.positions == Positions::original || !cache.evicts() || modifiers.once ||
      cache.shares_slots() || cache.budget.exempts())
    return length;
  const std::uint32_t admission =
      cache.prefill.chunk == 0 ? longest_prompt : std::min(longest_prompt, cache.prefill.chunk);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(length, modifiers.capacity(cache.budget_tokens, admission)));
}

std::string squeezed_cache(const ModelConfig& config) {
  return fmt::format("; --policy sink --budget {} --prefill stream stays within",
                     config.trained_context / 2);
}

void refuse_beyond_context(const ModelConfig& config, std::uint32_t span,
                           const std::string& advice) {
  if (span <= config.trained_context) return;
  throw std::invalid_argument(
      fmt::format("--prompt: needs {} positions; {} was trained on {}, and so many tokens would "
                  "fit; --beyond-context takes the prompt all the same{}",
                  span, config.name, config.trained_context, advice));
}

std::string context_warning(const ModelConfig& config, std::uint32_t span,
                            const std::string& advice) {
  if (span <= config.trained_context) return "";
  return fmt::format(
      "up to {} positions, beyond the {} this model was trained on: the text may degrade{}", span,
      config.trained_context, advice);
}

}  // namespace kvlab
