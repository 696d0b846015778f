// What an error of attention's outputs does further on, as linear maps of it: to the residual
// stream (`residual_error` in docs/metrics.md), and to the log-likelihood of tokens
// (`kl_estimate`).
#pragma once

#include <cstdint>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

class QuerySpan;  // sim/metrics.hpp

/// Directions of the residual stream that errors are taken in, of the 64 that a trace has: fewer
/// keep units of work small (results.md), and all configurations are seen in the same ones.
inline constexpr std::uint32_t kResidualColumns = 32;

/// The numbers that a query's error becomes: first directions of the residual stream, then draws.
struct ProjectionColumns {
  std::uint32_t residual = 0;  ///< kResidualColumns, or 0: the trace has no sketch
  std::uint32_t draws = 0;     ///< of gradients of the span

  std::uint32_t all() const { return residual + draws; }
};
/// Gradients count only where they were summed over the queries of `span`.
ProjectionColumns projection_columns(const TraceReader& trace, Span span);

/// The gradients of a KV head's query heads at the sampled queries: [sample, draw, group, dim].
std::vector<float> sampled_gradients(const TraceReader& trace, std::uint32_t layer,
                                     std::uint32_t kv_head, const QuerySpan& span);

/// The maps of one KV head's query heads.
class ErrorProjection {
 public:
  ErrorProjection(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                  const QuerySpan& span);

  std::uint32_t columns() const { return columns_.all(); }
  /// to [columns()] += the maps of full - factor * kept, the error of query head `head` of the
  /// group at a sampled query; full and kept [head_size].
  void add(std::uint32_t sample, std::uint32_t head, const float* full, const float* kept,
           float factor, float* to) const;

 private:
  static constexpr std::uint32_t kDraws = 4;  ///< that are taken together
  /// Fours of draws, the last padded.
  std::uint32_t fours() const { return (columns_.draws + kDraws - 1) / kDraws; }

  ProjectionColumns columns_;
  std::uint32_t group_, head_size_;
  std::vector<float> sketch_;     // [group, dim, kResidualColumns]
  std::vector<float> gradients_;  // [sample, group, four, dim, kDraws]
};

}  // namespace kvlab
