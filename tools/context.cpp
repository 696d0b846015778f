#include "tools/context.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace kvlab {
void add_context_option(po::options_description& options) {
  options.add_options()("beyond-context", po::bool_switch(),
                        "take a prompt that is longer than what the model was trained on");
}

std::uint32_t longest_span(const CacheOptions& cache, std::uint32_t longest_prompt,
                           std::uint32_t length) {
  if (cache.positions == Positions::original || !cache.policy.entry->info.evicts) return length;
  const std::uint32_t budget = cache.budgets.empty()
                                   ? cache.budget
                                   : *std::max_element(cache.budgets.begin(), cache.budgets.end());
  const std::uint32_t admission =
      cache.prefill.chunk == 0 ? longest_prompt : std::min(longest_prompt, cache.prefill.chunk);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(length, std::uint64_t{budget} - 1 + admission));
}

std::string squeezed_cache(const ModelConfig& config) {
  return fmt::format("; --policy sink --budget {} --prefill stream stays within",
                     config.trained_context / 2);
}

void refuse_beyond_context(const po::variables_map& options, const ModelConfig& config,
                           std::uint32_t span, const std::string& advice) {
  if (span <= config.trained_context || options["beyond-context"].as<bool>()) return;
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
