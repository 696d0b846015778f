// One KV head of one sequence: the input of a replay or of an end-to-end evaluation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/features/features.hpp"
#include "sim/error_projection.hpp"
#include "traces/base/numeric/aligned.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/numeric/rope.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// Queries, keys and values before RoPE, in float32, with strides in floats. The strides allow both
/// layouts, [head, token, dim] and [token, head, dim].
struct HeadView {
  std::uint32_t tokens = 0, group = 0, head_size = 0;
  const float* q = nullptr;  // [group, token, dim]
  std::size_t q_head_stride = 0, q_token_stride = 0;
  const float* k = nullptr;  // [token, dim]
  const float* v = nullptr;  // [token, dim]
  std::size_t kv_token_stride = 0;
  const float* sinks = nullptr;                    ///< [group] logits; null: none
  const ErrorProjection* projection = nullptr;     ///< null: no projected errors
  OutputWeights output = {};                       ///< W_o; only some features need it
  const FeaturesByName* feature_values = nullptr;  ///< features that are not computed; null: none
  const Rope* rope = nullptr;  ///< needed by scored features only; null: no RoPE
  float softmax_scale = 1;     ///< needed by scored features only

  /// The number of values to which the projection maps a query's error.
  ProjectionColumns projection_columns() const {
    return projection ? projection->columns() : ProjectionColumns{};
  }

  const float* query(std::uint32_t head, std::uint32_t token) const {
    return q + head * q_head_stride + token * q_token_stride;
  }
  /// Number of query heads in the `head_group`-th group of four.
  std::uint32_t heads_in(std::uint32_t head_group) const {
    return std::min(group - head_group * 4, 4u);
  }
  /// The query head's sink logit; null: none.
  const float* sink(std::uint32_t head) const { return sinks ? sinks + head : nullptr; }
  const float* key(std::uint32_t token) const { return k + token * kv_token_stride; }
};

/// The token features that a policy reads, for the tokens of a view.
class TokenFeatures {
 public:
  /// `appends`: all appends of the view's tokens. Throws std::logic_error if a feature is neither
  /// computed nor in view.feature_values.
  TokenFeatures(const std::vector<std::string>& names, const HeadView& view,
                const std::vector<Append>& appends, ScoreSettings settings = {});

  /// Features per token.
  std::size_t width() const { return width_; }
  /// The features of the tokens from `first` on, [token, width()]; null if the policy reads none.
  const float* from(std::size_t first) const {
    return width_ == 0 ? nullptr : values_.data() + first * width_;
  }

 private:
  std::size_t width_;
  std::vector<float> values_;  // [token, width_]
};

/// Adds to `feature_values` the features in `names` that kvlab cannot compute and that the trace
/// has. `knows_projections`: whether the output projections are known, so that features that depend
/// on them can be computed.
void add_trace_features(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                        const std::vector<std::string>& names, bool knows_projections,
                        FeaturesByName& feature_values);

/// Adds the features that a configuration's FeatureSource supplies for a KV head's tokens.
void add_supplied_features(const ResolvedConfig& config, std::uint32_t layer, std::uint32_t kv_head,
                           std::uint32_t tokens, FeaturesByName& feature_values);

/// One KV head's tensors, read from a trace, and the other data that a replay needs for the head.
struct HeadTensors {
  AlignedVector<float> q, k, v;  // [group, token, dim], [token, dim], [token, dim]
  std::unique_ptr<const ErrorProjection> projection;
  std::unique_ptr<FeaturesByName> feature_values;
  HeadView view;
};

/// Checks that the trace has this head. Throws std::invalid_argument if not.
void check_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head);

/// Reads queries, keys and values. Then releases the memory pages that the trace's file has mapped.
/// Throws as check_head() does.
HeadTensors read_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head);

/// The shape of a KV head whose trace has only selections, without its tensors.
HeadTensors shape_of_head(const TraceReader& trace);

/// The parameters of a row's arithmetic that do not depend on the head's data.
struct HeadArithmetic {
  float softmax_scale = 1.0f;
  /// Type to which queries and keys are rounded after RoPE at original positions; empty: no
  /// rounding.
  std::optional<Dtype> rounding;
  std::uint32_t threshold16 = 0;  ///< request threshold, times 2^16
  float softcap = 0;              ///< soft cap of scores; 0: none
  std::uint32_t window = 0;       ///< number of tokens that a query sees; 0: all
};

/// The parameters of a layer, with a request threshold. Throws std::invalid_argument unless the
/// threshold is between 0 and 1.
HeadArithmetic arithmetic_of(const TraceReader& trace, std::uint32_t layer, double threshold);

/// Rotates x [dim] to `position` by RoPE, rounds it to the type to which the model rounds, and
/// writes it to y.
void rotate_original(const RopeTable& rope, const HeadArithmetic& arithmetic, const float* x,
                     std::uint32_t head_size, std::uint32_t position, float* y);

/// Resolves `config` for a sequence of these segments. Also plans its appends: those of a prompt
/// depend on the prefill mode, and decoded tokens are appended one by one. Throws as the overload
/// of resolve() that takes a length does.
ResolvedConfig resolve(const CacheConfig& config, const std::vector<Segment>& segments,
                       std::uint32_t sequence, const CacheShape& model = {});
/// Sets the appends of a resolved configuration for these segments.
void plan_appends(ResolvedConfig& resolved, const std::vector<Segment>& segments);

}  // namespace kvlab
