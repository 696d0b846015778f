// Counts the tokens that a cache holds in the course of a sequence. Which tokens are live depends
// on observations, but their number does not. So the counts are the same for a replay on the CPU, a
// replay on a GPU and an end-to-end evaluation.
#pragma once

#include <cstdint>
#include <string>

#include "policies/cache_config.hpp"

namespace kvlab {

/// The counts of one KV head.
struct LiveCounts {
  std::uint64_t evictions = 0;
  /// Maximum number of live tokens, including during prompts, and the number after the last token.
  std::uint32_t max_live = 0, end = 0;
  // Memory of the held tokens, expressed as the number of 16-bit tokens that need the same bytes.
  double held_mean = 0;  ///< mean over decoded queries, including the query's token
  /// Peak over decoded queries. If no query is decoded, mean and peak are equal to held_end.
  double held_peak = 0;
  double held_end = 0;     ///< after the last token
  double held_budget = 0;  ///< capacity of the tiers; held_end if nothing is evicted
  /// Bytes that one block of kQuantBlock channels takes in the keys and values of all live tokens
  /// together: the maximum over all appends, prompts included.
  std::uint64_t bytes_peak = 0;
};

/// `config` must have its appends. `budget` is the budget of a head of the layer. An element that
/// is not quantized has `element_bytes` bytes. If the budget is ada(), the heads of a layer share
/// its slots. Then `budget` is the mean over these heads, and only the sums of the counts over
/// these heads are exact.
LiveCounts live_counts(const ResolvedConfig& config, std::uint32_t layer, std::uint32_t budget,
                       std::uint64_t element_bytes = sizeof(float));

/// Memory of a configuration in all heads of the layers without a window, in bytes.
struct Memory {
  double mean = 0, peak = 0;  ///< keys and values in 16 bit over decoded queries; the peak is the
                              ///< sum of the heads' peaks
  double state = 0;           ///< policy state after the last token, which `mean` does not include
  double budget = 0;          ///< bytes of the budget's tokens
  double exempt_peak = 0;     ///< the part of `peak` that is in layers exempt from the budget
  /// Memory of the layers with a sliding window, which `mean` and `peak` do not include. These
  /// layers keep exactly their window.
  double window_mean = 0, window_peak = 0;
  /// Bytes in 16 bit of the keys and values that are live at the end of the text, without the
  /// layers with a window.
  double end = 0;

  double total() const { return mean + state; }
};
/// Describes the memory of `layers` layers with a sliding window: "15 layers with a sliding window
/// also keep 1.20 MiB of keys and values on average, and 1.30 MiB at most". Empty for 0 layers.
std::string windows_text(std::size_t layers, double mean_bytes, double peak_bytes);
/// Splits a peak between the layers: "at most 1.30 MiB of keys and values in the layers where the
/// policy acts, 2.60 in exempt layers, 3.90 in total".
std::string exempt_text(double peak_bytes, double exempt_peak_bytes);
/// `config` must have its appends; `model` is the shape of the model.
Memory memory_of(const ResolvedConfig& config, const CacheShape& model);

/// Bytes of a token's policy state and features, its position and, with cache positions, its age.
std::uint64_t state_bytes_per_token(const CacheConfig& config);

}  // namespace kvlab
