// What a replay costs, beside one exact pass of attention over the same trace.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/device/cuda_replay.hpp"
#include "sim/exact_pass.hpp"
#include "sim/replay.hpp"
#include "traces/trace.hpp"

namespace kvlab {

// A random trace for measuring: attention with sinks, heavy tokens and a leaning to the recent, as
// trained models have it. Not for conclusions about policies.

struct SyntheticShape {
  std::uint32_t layers = 4, query_heads = 32, kv_heads = 8, head_size = 128;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  std::uint32_t gradient_samples =
      0;  ///< of gradients; with any, all that the metrics beyond attention need
};

/// Writes a bf16 trace to `directory`, which must not exist, with every feature that a registered
/// policy reads and no decoder computes. Its check rows are not computed: it does not verify.
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
  WorkTime time;          ///< each the least of the repeats
  double slot_steps = 0;  ///< live tokens attended, over queries, KV heads and configurations
  double ratio = 0;       ///< to the exact pass, by the clock
  double cpu_ratio = 0;   ///< the same of processor time
  double step_microseconds = 0;  ///< on a device: of a query and a wave of thread blocks
  double slot_steps_per_second() const { return slot_steps / time.seconds; }
};

struct ReplayCost {
  ExactPass exact;  ///< the least time of all repeats
  std::vector<SweepTime> sweeps;
  double bytes_read = 0;  ///< of the trace, by one replay
};

/// The sweeps of the bars: `sweep` ({lru, window, h2o, sink, streaming_h2o} x 8 budgets), its part
/// without cache positions, each of its policies, `feedback` (h2o and lru, 20 budgets each) and
/// 64 budgets of each nested order. `names`: which; empty: all. Also, where they are named, `shelf`
/// (every registered policy x 8 budgets) and any policy (x 8 budgets).
std::vector<BenchSweep> bench_sweeps(const std::vector<std::string>& names);
/// The names of all of them.
std::vector<std::string> bench_sweep_names();

/// Takes the exact pass and every sweep `repeats` times, in turns, and keeps the least time of
/// each. With a device both run there, and times are without reading the trace; else `device` is
/// null.
ReplayCost measure_replay(const TraceReader& trace, const std::vector<BenchSweep>& sweeps,
                          ReplayOptions options, unsigned repeats, CudaReplayer* device);

}  // namespace kvlab
