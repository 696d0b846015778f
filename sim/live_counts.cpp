#include "sim/live_counts.hpp"

#include <algorithm>
#include <map>

#include "policies/live_set.hpp"

namespace kvlab {

LiveCounts live_counts(const ResolvedConfig& config, std::uint32_t budget) {
  LiveCounts counts;
  std::uint64_t sum = 0, decoded = 0;
  bool after_prompt = false;
  for (const Admission& admission : config.admissions) {
    const std::uint32_t leaving =
        budget == kNoBudget ? 0 : config.policy.modifiers.surplus(counts.end, budget, after_prompt);
    counts.evictions += leaving;
    counts.end += admission.tokens - leaving;
    counts.most = std::max(counts.most, counts.end);
    after_prompt = admission.ends_prompt;
    if (!admission.decodes) continue;
    sum += counts.end, ++decoded;
    counts.peak = std::max(counts.peak, counts.end);
  }
  if (decoded == 0) counts.peak = counts.end;
  counts.mean = decoded == 0 ? counts.end : static_cast<double>(sum) / static_cast<double>(decoded);
  return counts;
}

Memory memory_of(const ResolvedConfig& config, HeadCounts model, std::uint32_t head_size) {
  std::map<std::uint32_t, double> heads;  // by budget
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (std::uint32_t head = 0; head < model.kv_heads; ++head)
      heads[config.budget_of(layer, head)] += 1;
  const auto bytes = static_cast<double>(kv_bytes_per_token(head_size)),
             state = static_cast<double>(state_bytes_per_token(config));
  Memory memory;
  for (const auto& [budget, count] : heads) {
    const LiveCounts counts = live_counts(config, budget);
    memory.mean += count * bytes * counts.mean;
    memory.peak += count * bytes * counts.peak;
    memory.state += count * state * counts.end;
    memory.budget += count * bytes * (budget == kNoBudget ? counts.end : budget);
  }
  return memory;
}

std::uint64_t state_bytes_per_token(const CacheConfig& config) {
  const std::uint64_t slot = config.policy.entry ? config.policy.entry->token_bytes() : 8;
  return slot + 4 + (config.positions == Positions::cache ? 4 : 0);
}

}  // namespace kvlab
