// Linear maps from an error of attention outputs to its effects: on the residual stream
// (`residual_error` in docs/reference/metrics.md), and on the log-likelihood of tokens
// (`kl_estimate`).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// Number of directions of the residual stream in which errors are measured. A trace has 64; fewer
/// are used so that the files of head tasks stay small. All configurations use the same directions.
inline constexpr std::uint32_t kResidualColumns = 32;

/// The number of values to which a query's error is mapped. They are of two kinds: directions of
/// the residual stream (for sampled queries), and gradient samples (for every measured query).
struct ProjectionColumns {
  std::uint32_t residual = 0;          ///< kResidualColumns; 0 if the trace has no sketch
  std::uint32_t gradient_samples = 0;  ///< gradient samples of the measured queries

  bool any() const { return residual + gradient_samples > 0; }
};
/// The columns that the trace has. The gradient samples are counted only if they were summed over
/// the measured `queries`.
ProjectionColumns projection_columns(const TraceReader& trace, Queries queries);

/// Reads the gradients of a KV head's query heads at some queries: [query, gradient sample, group,
/// dim].
std::vector<float> gradients_of(const TraceReader& trace, std::uint32_t layer,
                                std::uint32_t kv_head, std::span<const std::uint32_t> queries);

/// The maps for the query heads of one KV head.
class ErrorProjection {
 public:
  /// `trace` must outlive this object.
  ErrorProjection(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                  Queries queries);

  const ProjectionColumns& columns() const { return columns_; }
  /// Multiplies the output error of query head `head` of the group, full - factor * kept, by the
  /// sketch of W_o, and adds the result to `to` [residual columns]. `full` and `kept` are
  /// [head_size]. No-op if the trace has no sketch.
  void add_residual(std::uint32_t head, const float* full, const float* kept, float factor,
                    float* to) const;
  /// Gradients of queries [first, first + count): [query, gradient sample, group, dim].
  std::vector<float> gradients(std::uint32_t first, std::uint32_t count) const;

 private:
  const TraceReader& trace_;
  std::uint32_t layer_, kv_head_;
  ProjectionColumns columns_;
  std::vector<float> sketch_;  // [group, dim, kResidualColumns]
};

/// The gradients of a block of queries, read on first use.
class GradientBlock {
 public:
  /// `projection` may be null or have no gradient samples; then there are no gradients.
  explicit GradientBlock(const ErrorProjection* projection)
      : projection_(projection),
        gradient_samples_(projection ? projection->columns().gradient_samples : 0) {}

  std::uint32_t gradient_samples() const { return gradient_samples_; }
  void move_to(std::uint32_t first, std::uint32_t count) {
    first_ = first;
    count_ = count;
    rows_.clear();
  }
  /// Gradients of a query of the block: [gradient sample, group, dim].
  const float* row(std::uint32_t query) {
    if (rows_.empty()) rows_ = projection_->gradients(first_, count_);
    return rows_.data() + (query - first_) * (rows_.size() / count_);
  }

 private:
  const ErrorProjection* projection_;
  std::uint32_t gradient_samples_, first_ = 0, count_ = 0;
  std::vector<float> rows_;
};

}  // namespace kvlab
