// How many tokens a cache holds through a sequence. Who is live depends on what is observed, how
// many are does not: one count for every executor.
#pragma once

#include <cstdint>
#include <string>

#include "policies/cache_config.hpp"

namespace kvlab {

/// Of one KV head.
struct LiveCounts {
  std::uint64_t evictions = 0;
  std::uint32_t most = 0, end = 0;  ///< prompts included; behind the last token
  // Bytes, in tokens of 16 bit.
  double held_mean = 0;    ///< over decoded queries, each itself included
  double held_peak = 0;    ///< likewise; both are `held_end` where none is decoded
  double held_end = 0;     ///< behind the last token
  double held_budget = 0;  ///< what the tiers have room for, or held_end where nothing is evicted
  /// The most at once, prompts included: bytes of kQuantBlock channels.
  std::uint64_t bytes_peak = 0;
};

/// `config` with its appends; `budget` is the head's; an element that is not quantized has so many
/// bytes. Under ada() `budget` is the mean over the
/// heads of a layer, and the sums over them are right.
LiveCounts live_counts(const ResolvedConfig& config, std::uint32_t budget,
                       std::uint64_t element_bytes = sizeof(float));

/// What a configuration holds in all heads of the layers without a window, bytes.
struct Memory {
  double mean = 0, peak = 0;  ///< keys and values over decoded queries, 16 bit; the heads' summed
  double state = 0;           ///< policy state beside them, at the end
  double budget = 0;          ///< what the budget's tokens would take
  double exempt_peak = 0;     ///< of `peak`: in the layers that a budget exempts
  /// Beside these: of the layers with a window, which keep it as `window` does.
  double window_mean = 0, window_peak = 0;
  double end = 0;  ///< keys and values after the last token, 16 bit; without those layers

  double total() const { return mean + state; }
};
/// "15 layers with a window beside them keep 1.20 MiB of keys and values, at most 1.30", or "".
std::string windows_text(std::size_t layers, double mean_bytes, double peak_bytes);
/// "at most 1.30 MiB of keys and values where it acts, 2.60 in exempt layers, 3.90 together"
std::string exempt_text(double peak_bytes, double exempt_peak_bytes);
/// `config` with its appends, in a model of such heads.
Memory memory_of(const ResolvedConfig& config, const CacheShape& model);

/// Of its policy state and features, its position and, where positions are cache positions, its
/// rank.
std::uint64_t state_bytes_per_token(const CacheConfig& config);

}  // namespace kvlab
