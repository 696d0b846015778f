// From what each KV head left behind to rows of metrics: by head, by layer, and for everything.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/error_projection.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

// What the KV heads of a layer leave behind together: errors whose heads are summed before a root
// or a square is taken.

/// Errors of a layer: of the heads' outputs side by side; their squares behind W_o, by the residual
/// stream's norm, and what of these quantization adds; halves of squared changes of log-likelihood.
struct LayerError {
  enum Kind : std::size_t { outputs, residual, quantization, kl, count };
};

/// One such error of all heads together and, but for outputs, of each KV head by itself. Without
/// weight where it is not known.
struct LayerRatios {
  std::vector<BlockedRatio> layer;               // [configuration]
  std::vector<std::vector<BlockedRatio>> heads;  // [kv_head][configuration]
};

/// One layer's outcomes, and its errors over all heads.
struct LayerOutcome {
  std::vector<std::vector<HeadOutcome>> heads;  // [kv_head][configuration]
  std::array<LayerRatios, LayerError::count> errors;
  /// [configuration][measured query, gradient sample]: changes of log-likelihood, heads summed; or
  /// empty.
  std::vector<std::vector<float>> changes;
};

/// What is known of a layer beside its outcomes.
struct LayerFacts {
  ProjectionColumns columns;
  std::vector<float> norm2;  // of the residual stream, [sample]; or empty
};

/// Sums a layer's errors over its heads, in order, then drops what was kept for each query.
void reduce_layer(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t configs,
                  const LayerFacts& facts, unsigned threads);

/// The changes of log-likelihood of all layers together, whose squares are `kl_estimate_joint`.
class JointChanges {
 public:
  explicit JointChanges(std::size_t configs) : sums_(configs) {}

  /// Layers come in order; takes their changes out.
  void add(LayerOutcome& layer);
  /// By configuration; without weight where no layer has changes.
  std::vector<BlockedRatio> squares(const MeasuredQueries& measured,
                                    std::uint32_t gradient_samples) const;

 private:
  std::vector<std::vector<float>> sums_;  // [configuration][measured query, gradient sample]
};

/// All of a replay.
struct ReplayOutcome {
  const ModelShape& shape;  ///< with the layers' numbers
  const MeasuredQueries& measured;
  std::span<const ResolvedConfig> configs;
  std::span<const std::uint32_t> layer_indices;
  const std::vector<LayerOutcome>& layers;
  std::span<const BlockedRatio> joint;  ///< JointChanges::squares()
};

/// One row a metric, ordered by configuration, layer, head (the aggregate last) and metric.
std::vector<Measurement> tabulate(const ReplayOutcome& outcome);

}  // namespace kvlab
