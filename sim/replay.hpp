// Replay: one captured sequence through many policies x budgets, by the formulas of
// docs/metrics.md.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/live_set.hpp"
#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kOracleMass = "oracle_mass";
inline constexpr std::string_view kOracleTopk = "oracle_topk";
/// The references of the replay, as parse_policy wants them.
std::span<const std::string_view> replay_references();

/// One configuration of the grid.
struct ReplayConfig {
  PolicySpec policy;
  Budget budget;
  Prefill prefill;
  Positions positions = Positions::original;
  std::uint64_t seed = 0;
};

enum class Span { decode, all };

struct ReplayOptions {
  Span span = Span::decode;
  double threshold = 0.01;          ///< tau
  bool every_output_error = false;  ///< false: every eighth query of the span
  unsigned threads = 1;
  std::vector<std::uint32_t> layers;     ///< empty: all
  std::function<void(double)> progress;  ///< called with the fraction done; may be empty
};

/// One figure. `layer` and `head` are -1 for the aggregates.
struct Measurement {
  std::size_t config;  ///< index
  std::int32_t layer, head;
  std::string metric;
  double value;
  double standard_error;  ///< NaN where there is none
  std::uint64_t count;    ///< queries x query heads
};

/// What one head kept over time: for pictures.
struct KeptSet {
  std::uint32_t query;                   ///< position
  std::vector<std::uint32_t> positions;  ///< live while it attended, ascending
};

struct ReplayResult {
  std::vector<std::uint32_t> budget_tokens;  ///< by configuration
  std::vector<Measurement> measurements;     ///< ordered: configuration, layer, head, metric
};

/// Replays `trace` (index `sequence` of the run) through `configs`. The unit of work is one KV head
/// of one layer, all configurations together. Results do not depend on the number of threads.
/// Throws std::invalid_argument: a span without queries, guards that do not fit, a reference asked
/// for with squeezed positions, a layer that is not there, …
ReplayResult replay(const TraceReader& trace, std::uint32_t sequence,
                    std::span<const ReplayConfig> configs, const ReplayOptions& options);

/// The kept set of one configuration and head at each query. `queries`: which (ascending
/// positions).
std::vector<KeptSet> kept_sets(const TraceReader& trace, std::uint32_t sequence,
                               const ReplayConfig& config, const ReplayOptions& options,
                               std::uint32_t layer, std::uint32_t kv_head,
                               std::span<const std::uint32_t> queries);

}  // namespace kvlab
