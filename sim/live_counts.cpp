#include "sim/live_counts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "policies/aged_set.hpp"
#include "policies/tiers/tier_counts.hpp"

namespace kvlab {
namespace {

/// Computes the memory of a cache's tokens from the number of tokens on each tier.
class TierBytes : public TierCounts {
 public:
  using TierCounts::TierCounts;

  /// The memory while the last `attending` tokens attend, expressed as a number of 16-bit tokens.
  double held_tokens(std::uint32_t attending) const {
    if (tier_plan()[0].format.kivi)
      return static_cast<double>(kivi_bytes(attending, 2)) / KvFormat{}.block_bytes();
    return in_16_bit([&](std::size_t tier) { return on(tier); });
  }
  /// Bytes of one block of channels of all tokens, as in LiveCounts::bytes_peak. The youngest
  /// `staged` tokens are not quantized yet.
  std::uint64_t bytes(std::uint32_t staged, std::uint64_t element_bytes) const {
    if (tier_plan()[0].format.kivi) return kivi_bytes(std::max(staged, 1u), element_bytes);
    std::uint64_t bytes = staged * KvFormat{}.block_bytes_of(element_bytes);
    for (std::size_t r = 0; r < tier_plan().size(); ++r)
      bytes +=
          (on(r) - (r == 0 ? staged : 0)) * tier_plan()[r].format.block_bytes_of(element_bytes);
    return bytes;
  }
  double capacity() const {
    return in_16_bit([&](std::size_t tier) { return tier_plan()[tier].slots; });
  }

 private:
  /// Bytes of one block of channels of all tokens. The last `exact` tokens are not quantized yet,
  /// and an exact element takes `element_bytes` bytes.
  std::uint64_t kivi_bytes(std::uint32_t exact, std::uint64_t element_bytes) const {
    const KvFormat& format = tier_plan()[0].format;
    const std::uint64_t keys = kivi_keys(on(0) - exact), values = kivi_values(on(0) - exact);
    return keys * format.key->block_bytes() + values * format.value->block_bytes() +
           (2 * std::uint64_t{on(0)} - keys - values) * kQuantBlock * element_bytes;
  }
  /// The bytes of count(tier) tokens on each tier, expressed in 16-bit tokens.
  template <class Count>
  double in_16_bit(Count count) const {
    double bytes = 0;
    for (std::size_t r = 0; r < tier_plan().size(); ++r)
      bytes += static_cast<double>(count(r)) * tier_plan()[r].format.block_bytes();
    return bytes / KvFormat{}.block_bytes();
  }
};

}  // namespace

LiveCounts live_counts(const ResolvedConfig& config, std::uint32_t layer, std::uint32_t budget,
                       std::uint64_t element_bytes) {
  const auto* const own = config.tiers_of(layer, budget);
  const std::vector<TierSlots> tiers = own ? *own : std::vector{TierSlots{.slots = budget}};
  LiveCounts counts;
  TierBytes on(tiers);
  const std::uint32_t centre = own ? config.centre_tokens() : 0;
  std::uint64_t decoded = 0;
  double held = 0;
  bool after_prompt = false;
  for (const Append& append : config.appends) {
    const std::uint32_t num_evicted =
        on.evict_to_budget(config.policy.modifiers, budget, after_prompt);
    on.append(append.tokens);
    counts.evictions += num_evicted;
    counts.end += append.tokens - num_evicted;
    counts.max_live = std::max(counts.max_live, counts.end);
    const std::uint32_t staged = append.tokens > 1 ? append.tokens : 0;
    counts.bytes_peak = std::max(counts.bytes_peak, on.bytes(staged, element_bytes));
    after_prompt = append.ends_prompt;
    if (!append.decodes) continue;
    held += on.held_tokens(1), ++decoded;
    counts.held_peak = std::max(counts.held_peak, on.held_tokens(1));
  }
  counts.held_end = on.held_tokens(0);
  counts.held_budget = budget == kNoBudget ? counts.held_end : on.capacity();
  if (decoded == 0) counts.held_peak = counts.held_end;
  counts.held_mean = decoded == 0 ? counts.held_end : held / static_cast<double>(decoded);
  for (double* const counter :
       {&counts.held_mean, &counts.held_peak, &counts.held_end, &counts.held_budget})
    *counter += centre;
  counts.bytes_peak += std::uint64_t{centre} * KvFormat{}.block_bytes();
  return counts;
}

Memory memory_of(const ResolvedConfig& config, const CacheShape& model) {
  std::map<std::uint32_t, double> window_counts;                    // by budget
  std::map<std::pair<std::uint32_t, std::uint32_t>, double> heads;  // by layer_key() and budget
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (std::uint32_t head = 0; head < model.kv_heads; ++head)
      if (const std::uint32_t budget = config.budget_of(layer, head); config.window_of(layer) > 0)
        window_counts[budget] += 1;
      else
        heads[{config.layer_key(layer), budget}] += 1;
  const auto bytes = static_cast<double>(kv_bytes_per_token(model.head_size)),
             state = static_cast<double>(state_bytes_per_token(config)),
             plain = static_cast<double>(state_bytes_per_token({}));
  Memory memory;
  for (const auto& [key, count] : heads) {
    const auto [layer, budget] = key;
    const LiveCounts counts = live_counts(config, layer, budget);
    memory.mean += count * bytes * counts.held_mean;
    memory.peak += count * bytes * counts.held_peak;
    memory.end += count * bytes * counts.held_end;
    const bool exempt = config.evicts() && budget == kNoBudget;
    memory.exempt_peak += exempt ? count * bytes * counts.held_peak : 0;
    memory.state += count * (exempt ? plain : state) * counts.end;
    memory.budget += count * bytes * counts.held_budget;
  }
  ResolvedConfig window;
  window.appends = config.appends;
  for (const auto& [size, count] : window_counts) {
    const LiveCounts counts = live_counts(window, 0, size);
    memory.window_mean += count * bytes * counts.held_mean;
    memory.window_peak += count * bytes * counts.held_peak;
  }
  return memory;
}

std::string windows_text(std::size_t layers, double mean_bytes, double peak_bytes) {
  if (layers == 0) return "";
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "{} layers with a sliding window also keep {:.2f} MiB of keys and values on average, and "
      "{:.2f} "
      "MiB at most",
      layers, mean_bytes / kMiB, peak_bytes / kMiB);
}

std::string exempt_text(double peak_bytes, double exempt_peak_bytes) {
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "at most {:.2f} MiB of keys and values in the layers where the policy acts, {:.2f} in exempt "
      "layers, {:.2f} in total",
      (peak_bytes - exempt_peak_bytes) / kMiB, exempt_peak_bytes / kMiB, peak_bytes / kMiB);
}

std::uint64_t state_bytes_per_token(const CacheConfig& config) {
  const std::uint64_t slot = config.policy.entry ? config.policy.entry->token_bytes() : 8;
  return slot + 4 + (config.positions == Positions::cache ? 4 : 0);
}

}  // namespace kvlab
