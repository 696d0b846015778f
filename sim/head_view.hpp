// One KV head of one sequence, as a replay and the end-to-end evaluation see it.
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

/// Queries, keys and values before RoPE, float32, strided: both [head, token, dim] and
/// [token, head, dim] fit. Strides are in floats.
struct HeadView {
  std::uint32_t tokens = 0, group = 0, head_size = 0;
  const float* q = nullptr;  // [group, token, dim]
  std::size_t q_head_stride = 0, q_token_stride = 0;
  const float* k = nullptr;  // [token, dim]
  const float* v = nullptr;  // [token, dim]
  std::size_t kv_token_stride = 0;
  const float* sinks = nullptr;                    ///< [group] logits; null: none
  const ErrorProjection* projection = nullptr;     ///< null: none is taken
  OutputWeights output = {};                       ///< for features that are computed from it
  const FeaturesByName* feature_values = nullptr;  ///< features that are not computed; null: none
  const Rope* rope = nullptr;                      ///< for scored features; null: there are none
  float softmax_scale = 1;                         ///< likewise

  /// The columns of the projection.
  ProjectionColumns projection_columns() const {
    return projection ? projection->columns() : ProjectionColumns{};
  }

  const float* query(std::uint32_t head, std::uint32_t token) const {
    return q + head * q_head_stride + token * q_token_stride;
  }
  /// Query heads of the `head_group`-th four.
  std::uint32_t heads_in(std::uint32_t head_group) const {
    return std::min(group - head_group * 4, 4u);
  }
  /// Its sink logit; null: none.
  const float* sink(std::uint32_t head) const { return sinks ? sinks + head : nullptr; }
  const float* key(std::uint32_t token) const { return k + token * kv_token_stride; }
};

/// What the tokens of a view bring a policy.
class TokenFeatures {
 public:
  /// `appends`: of the whole view. Throws std::logic_error where a feature that is not computed
  /// is not there.
  TokenFeatures(const std::vector<std::string>& names, const HeadView& view,
                const std::vector<Append>& appends, ScoreSettings settings = {});

  /// Features of a token.
  std::size_t width() const { return width_; }
  /// [token from `first` on, width()]; null of a policy without features.
  const float* from(std::size_t first) const {
    return width_ == 0 ? nullptr : values_.data() + first * width_;
  }

 private:
  std::size_t width_;
  std::vector<float> values_;  // [token, width_]
};

/// Adds to `brought` those of `names` that are not computed, with the output projections or without
/// them, from a trace that has them.
void bring_features(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                    const std::vector<std::string>& names, bool knows_projections,
                    FeaturesByName& feature_values);

/// What a configuration's source of features brings the tokens of a KV head.
void bring(const ResolvedConfig& config, std::uint32_t layer, std::uint32_t kv_head,
           std::uint32_t tokens, FeaturesByName& feature_values);

/// One KV head's tensors, read from a trace, and what a replay adds to them.
struct HeadTensors {
  AlignedVector<float> q, k, v;  // [group, token, dim], [token, dim], [token, dim]
  std::unique_ptr<const ErrorProjection> projection;
  std::unique_ptr<FeaturesByName> feature_values;
  HeadView view;
};

/// Throws std::invalid_argument where the trace has no such head.
void check_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head);

/// Queries, keys and values; then lets go of the trace's pages. Throws as check_head() does.
HeadTensors read_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head);

/// What else decides a row's arithmetic.
struct HeadArithmetic {
  float softmax_scale = 1.0f;
  std::optional<Dtype> rounding;  ///< q and k are rounded to it after RoPE at original positions
  std::uint32_t threshold16 = 0;  ///< of requests
  float softcap = 0;              ///< of scores; 0: none
  std::uint32_t window = 0;       ///< tokens that a query sees; 0: all
};

/// A layer's own, at a threshold of requests: throws std::invalid_argument unless it is between 0
/// and 1.
HeadArithmetic arithmetic_of(const TraceReader& trace, std::uint32_t layer, double threshold);

/// y = x [dim] rotated to its original position, and rounded as the model does.
void rotate_original(const RopeTable& rope, const HeadArithmetic& arithmetic, const float* x,
                     std::uint32_t head_size, std::uint32_t position, float* y);

/// `config` for a sequence of these segments, whose appends are known: prompts by the prefill,
/// decoded tokens one by one. Throws as resolve() by length does.
ResolvedConfig resolve(const CacheConfig& config, const std::vector<Segment>& segments,
                       std::uint32_t sequence, const CacheShape& model = {});
/// Sets the appends of a resolved configuration to those of these segments.
void plan_appends(ResolvedConfig& resolved, const std::vector<Segment>& segments);

}  // namespace kvlab
