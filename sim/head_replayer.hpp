// The interface of a device that replays KV heads in place of the CPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/replay.hpp"
#include "sim/run/tabulate.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {

/// The data that all head tasks of a replay have in common.
struct ReplayPlan {
  const TraceReader& trace;
  std::uint32_t sequence;
  const LayerRopes& ropes;
  std::span<const HeadArithmetic> arithmetics;  ///< by layer
  const MeasuredQueries& measured;
  unsigned threads;
  std::vector<const ResolvedConfig*> configs;
  const OutputProjections* output;  ///< W_o of the model; null: unknown
};

/// Runs many KV heads through many configurations together, on a device.
class HeadReplayer {
 public:
  virtual ~HeadReplayer() = default;
  /// Whether the device supports the configuration. If it does not, the CPU runs the configuration.
  /// The result holds for all layers of the trace.
  virtual bool takes(const TraceReader& trace, const CacheConfig& config) const = 0;
  /// Returns outcomes by head task, then by configuration of the plan. Throws std::runtime_error if
  /// the device fails or its memory is too small for one head task.
  virtual std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                                    std::span<const HeadTask> tasks) = 0;
  /// Seconds that run() has spent so far on reading traces and sending them to the device.
  virtual double reading_seconds() const = 0;
};

}  // namespace kvlab
