// From what each KV head left behind to rows of figures: by head, by layer, and for everything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// One layer's outcomes, and its errors over all heads.
struct LayerOutcome {
  std::vector<std::vector<HeadOutcome>> heads;  // [kv_head][configuration]
  std::vector<BlockedRatio> error;              // [configuration]: of concatenated heads
  /// [configuration], and [kv_head][configuration]: behind W_o; without weight where unknown.
  std::vector<BlockedRatio> residual;
  std::vector<std::vector<BlockedRatio>> head_residual;
};

/// Sums a layer's errors over its heads, in order, then drops what was kept for each query.
/// `norm2`: of the residual stream, [sample]; empty: not known.
void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs,
                  std::span<const float> norm2);

/// One row a figure, ordered by configuration, layer, head (the aggregate last) and metric.
std::vector<Measurement> tabulate(const ModelShape& shape, const QuerySpan& span,
                                  std::span<const CacheConfig> configs,
                                  std::span<const std::uint32_t> layer_indices,
                                  const std::vector<LayerOutcome>& layers);

}  // namespace kvlab
