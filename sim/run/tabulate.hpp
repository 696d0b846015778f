// From what each KV head left behind to rows of figures: by head, by layer, and for everything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/replay.hpp"
#include "sim/run/layer_outcome.hpp"

namespace kvlab {

/// All of a replay.
struct ReplayOutcome {
  const ModelShape& shape;  ///< with the layers' numbers
  const QuerySpan& span;
  std::span<const ResolvedConfig> configs;
  std::span<const std::uint32_t> layer_indices;
  const std::vector<LayerOutcome>& layers;
  std::span<const BlockedRatio> joint;  ///< JointChanges::squares()
};

/// One row a figure, ordered by configuration, layer, head (the aggregate last) and metric.
std::vector<Measurement> tabulate(const ReplayOutcome& outcome);

}  // namespace kvlab
