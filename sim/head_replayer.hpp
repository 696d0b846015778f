// Where KV heads may be replayed other than on this CPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/replay.hpp"
#include "sim/run/tabulate.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {

/// What the head tasks of a replay have in common.
struct ReplayPlan {
  const TraceReader& trace;
  std::uint32_t sequence;
  const LayerRopes& ropes;
  std::span<const HeadArithmetic> arithmetics;  ///< by layer
  const MeasuredQueries& measured;
  unsigned threads;
  std::vector<const ResolvedConfig*> configs;
  const OutputProjections* output;  ///< of the model; null: not known
};

/// Takes many KV heads through many configurations together: a device.
class HeadReplayer {
 public:
  virtual ~HeadReplayer() = default;
  /// Whether it can; what it cannot the CPU does. All layers of the trace are alike in this.
  virtual bool takes(const TraceReader& trace, const CacheConfig& config) const = 0;
  /// The outcomes by head task, then by configuration of the plan. Throws std::runtime_error: the
  /// device fails, or is too small for one head task.
  virtual std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                                    std::span<const HeadTask> tasks) = 0;
  /// What run() has spent on reading traces and moving them to the device, so far.
  virtual double reading_seconds() const = 0;
};

}  // namespace kvlab
