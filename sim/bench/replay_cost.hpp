// Measures the cost of a replay, compared with one exact attention pass over the same trace.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/device/cuda_replay.hpp"
#include "sim/exact_pass.hpp"
#include "sim/replay.hpp"
#include "traces/trace.hpp"

namespace kvlab {

// A random trace for benchmarks. Its attention has sinks, heavy tokens and a preference for recent
// tokens, as in trained models. Do not draw conclusions about policies from it.

struct SyntheticShape {
  std::uint32_t layers = 4, query_heads = 32, kv_heads = 8, head_size = 128;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  /// Number of gradient samples. If it is above 0, the trace has all extras that the metrics beyond
  /// attention need.
  std::uint32_t gradient_samples = 0;
};

/// Writes a bf16 trace to `directory`, which must not exist. It has every token feature that a
/// registered policy reads and that decoders cannot compute. Its check rows are not computed, so
/// the verification of the trace fails.
TraceReader write_synthetic_trace(const std::filesystem::path& directory,
                                  const SyntheticShape& shape, std::uint64_t seed);

/// Configurations that are timed together.
struct BenchSweep {
  std::string name;
  std::vector<CacheConfig> configs;
};

struct SweepTime {
  std::string name;
  std::size_t configs = 0;
  WorkTime time;  ///< minimum over the repeats, separately for wall clock and CPU time
  /// Number of live tokens to which a query attends, summed over queries, KV heads and
  /// configurations.
  double slot_steps = 0;
  double ratio = 0;      ///< wall-clock time divided by that of the exact pass
  double cpu_ratio = 0;  ///< the same in CPU time
  /// On a device: microseconds for one query and one wave of thread blocks.
  double step_microseconds = 0;
  double slot_steps_per_second() const { return slot_steps / time.seconds; }
};

struct ReplayCost {
  ExactPass exact;  ///< the minimum time over the repeats
  std::vector<SweepTime> sweeps;
  double bytes_read = 0;  ///< bytes of the trace that one replay reads
};

/// The standard sweeps are `sweep` ({lru, window, h2o, sink, streaming_h2o} x 8 budgets),
/// `original_positions` (those of its policies that use original positions), each policy of `sweep`
/// alone, `feedback` (h2o and lru x 20 budgets), and some policies and oracles x 64 budgets
/// (their names end in `_64`). `names` selects sweeps; if it is empty, all standard sweeps are
/// returned. Two kinds of sweeps run only if `names` has them: `shelf` (every registered policy x 8
/// budgets), and the name of any policy (that policy x 8 budgets).
std::vector<BenchSweep> bench_sweeps(const std::vector<std::string>& names);
/// The names of the standard sweeps.
std::vector<std::string> bench_sweep_names();

/// Runs the exact pass and every sweep `repeats` times, in turns, and keeps the minimum time of
/// each. If `device` is not null, both run on that device, and the times exclude reading the trace.
ReplayCost measure_replay(const TraceReader& trace, const std::vector<BenchSweep>& sweeps,
                          ReplayOptions options, unsigned repeats, CudaReplayer* device);

}  // namespace kvlab
