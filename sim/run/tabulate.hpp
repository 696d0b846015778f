// Converts the outcomes of KV heads to rows of metrics: by head, by layer, and for the model.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/error_projection.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

// The following types hold the results of all KV heads of a layer. Errors are summed over the heads
// before a root or a square is computed.

/// The kinds of errors of a layer. outputs: errors of the concatenated outputs of the heads.
/// residual: squared errors after W_o, relative to the squared norm of the residual stream.
/// quantization: the part of `residual` that is due to quantization. kl: half of the squared
/// changes of log-likelihood.
struct LayerError {
  enum Kind : std::size_t { outputs, residual, quantization, kl, count };
};

/// One kind of error, for all heads together and for each KV head (`outputs` exists only for all
/// heads together). A ratio that is unknown has weight 0.
struct LayerRatios {
  std::vector<BlockedRatio> layer;               // [configuration]
  std::vector<std::vector<BlockedRatio>> heads;  // [kv_head][configuration]
};

/// One layer's outcomes, and its errors over all heads.
struct LayerOutcome {
  std::vector<std::vector<HeadOutcome>> heads;  // [kv_head][configuration]
  std::array<LayerRatios, LayerError::count> errors;
  /// [configuration][measured query, gradient sample]: changes of log-likelihood, summed over
  /// heads; may be empty
  std::vector<std::vector<float>> changes;
};

/// Data of a layer that is needed in addition to its outcomes.
struct LayerFacts {
  ProjectionColumns columns;
  std::vector<float> norm2;  // squared norms of the residual stream, [sample]; may be empty
};

/// Sums a layer's errors over its heads, in the order of the heads. Then frees the data of single
/// queries.
void reduce_layer(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t configs,
                  const LayerFacts& facts, unsigned threads);

/// Estimates for all layers together, [configuration]. They have weight 0 if no layer has changes.
struct JointEstimates {
  std::vector<BlockedRatio> kl, acceptance;
};

/// Sums the changes of log-likelihood over layers. `kl_estimate_joint` and `acceptance` are
/// computed from the squares of these sums at each query.
class JointChanges {
 public:
  explicit JointChanges(std::size_t configs) : sums_(configs) {}

  /// Adds the layer's changes to the sums, and frees them. Call it for the layers in order.
  void add(LayerOutcome& layer);
  JointEstimates estimates(const MeasuredQueries& measured, std::uint32_t gradient_samples) const;

 private:
  std::vector<std::vector<float>> sums_;  // [configuration][measured query, gradient sample]
};

/// The factor u_d = Γ(d/2) · √(d/2) / Γ((d+1)/2). The root of a mean of d squares of a normal
/// variable is on average the variable's standard deviation divided by u_d.
double unbiased_root_factor(std::uint32_t gradient_samples);
/// The share of drafted tokens that is accepted at a query whose KL was estimated from
/// `gradient_samples` samples. For a small normal error of the logits, the total variation distance
/// of the two distributions is √(KL/π).
double acceptance_estimate(double kl, std::uint32_t gradient_samples);

/// The complete results of a replay.
struct ReplayOutcome {
  const ModelShape& shape;  ///< includes the layer numbers
  const MeasuredQueries& measured;
  std::span<const ResolvedConfig> configs;
  std::span<const std::uint32_t> layer_indices;
  const std::vector<LayerOutcome>& layers;
  const JointEstimates& joint;
  bool has_attention = true;  ///< false: the trace has only selections
};

/// One row per metric, ordered by configuration, layer, head (with aggregates last) and metric.
std::vector<Measurement> tabulate(const ReplayOutcome& outcome);

}  // namespace kvlab
