// From what each KV head left behind to rows of figures: by head, by layer, and for everything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// One layer's outcomes, and its errors over concatenated heads.
struct LayerOutcome {
  std::vector<std::vector<HeadOutcome>> heads;  // [kv_head][configuration]
  std::vector<BlockedRatio> error;              // [configuration]
};

/// Sums the squared norms of a layer's outputs over its heads, in order, then drops them.
void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs);

/// One row a figure, ordered by configuration, layer, head (the aggregate last) and metric.
std::vector<Measurement> tabulate(const ModelShape& shape, const QuerySpan& span,
                                  std::span<const CacheConfig> configs,
                                  std::span<const std::uint32_t> layer_indices,
                                  const std::vector<LayerOutcome>& layers);

}  // namespace kvlab
