// What an error of attention's outputs does further on, as linear maps of it: to the residual
// stream (`residual_error` in docs/reference/metrics.md), and to the log-likelihood of tokens
// (`kl_estimate`).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// Directions of the residual stream that errors are taken in, of the 64 that a trace has: fewer
/// keep units of work small (results.md), and all configurations are seen in the same ones.
inline constexpr std::uint32_t kResidualColumns = 32;

/// The numbers that a query's error becomes: of a sampled query directions of the residual stream,
/// of every query gradient samples.
struct ProjectionColumns {
  std::uint32_t residual = 0;          ///< kResidualColumns, or 0: the trace has no sketch
  std::uint32_t gradient_samples = 0;  ///< of gradients of the measured queries

  bool any() const { return residual + gradient_samples > 0; }
};
/// Gradients count only where they were summed over the measured `queries`.
ProjectionColumns projection_columns(const TraceReader& trace, Queries queries);

/// The gradients of a KV head's query heads at some queries: [query, gradient sample, group, dim].
std::vector<float> gradients_of(const TraceReader& trace, std::uint32_t layer,
                                std::uint32_t kv_head, std::span<const std::uint32_t> queries);

/// The maps of one KV head's query heads.
class ErrorProjection {
 public:
  /// `trace` must outlive this.
  ErrorProjection(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                  Queries queries);

  const ProjectionColumns& columns() const { return columns_; }
  /// to [residual columns] += what full - factor * kept, the error of query head `head` of the
  /// group, is behind W_o; full and kept [head_size]. Nothing without a sketch.
  void add_residual(std::uint32_t head, const float* full, const float* kept, float factor,
                    float* to) const;
  /// Of queries [first, first + count): [query, gradient sample, group, dim].
  std::vector<float> gradients(std::uint32_t first, std::uint32_t count) const;

 private:
  const TraceReader& trace_;
  std::uint32_t layer_, kv_head_;
  ProjectionColumns columns_;
  std::vector<float> sketch_;  // [group, dim, kResidualColumns]
};

/// The gradients of a block of queries, read when they are first requested.
class GradientBlock {
 public:
  /// `projection` may be null, or without gradient samples: then there are none.
  explicit GradientBlock(const ErrorProjection* projection)
      : projection_(projection),
        gradient_samples_(projection ? projection->columns().gradient_samples : 0) {}

  std::uint32_t gradient_samples() const { return gradient_samples_; }
  void move_to(std::uint32_t first, std::uint32_t count) {
    first_ = first;
    count_ = count;
    rows_.clear();
  }
  /// Of a query of the block: [gradient sample, group, dim].
  const float* of(std::uint32_t query) {
    if (rows_.empty()) rows_ = projection_->gradients(first_, count_);
    return rows_.data() + (query - first_) * (rows_.size() / count_);
  }

 private:
  const ErrorProjection* projection_;
  std::uint32_t gradient_samples_, first_ = 0, count_ = 0;
  std::vector<float> rows_;
};

}  // namespace kvlab
