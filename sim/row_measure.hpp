// Computes the metrics of live sets on one KV head, query by query. The plain replay and the
// configuration batches both use it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/metrics.hpp"

namespace kvlab {

class RowMeasure {
 public:
  /// Maximum number of queries whose factors are multiplied, so that the sum of their logarithms
  /// needs only one logarithm. The product of that many factors is at least kMinFactor^32 = 1e-288.
  static constexpr std::uint32_t kTogether = 32;

  RowMeasure() = default;
  /// If `measured` is null, nothing is measured. `measured` and the view's projection must outlive
  /// this object.
  RowMeasure(const MeasuredQueries* measured, std::size_t sets, const HeadView& view,
             std::uint32_t together = kTogether);

  /// Call before the first query if tiers are quantized. It makes space for the results of
  /// add_quantization().
  void separate_quantization() {
    for (HeadStats& stats : stats_) stats.residual.resize(2 * stats.residual.size());
  }
  /// Whether add_quantization() should be called for a measured query.
  bool wants_quantization(std::uint32_t query) const {
    return samples(query) && !stats_.front().residual.empty();
  }

  bool measures(std::uint32_t query) const { return measured_ && measured_->contains(query); }
  /// Whether errors are measured at a measured query.
  bool samples(std::uint32_t query) const { return measured_->is_sampled(query); }

  // The following functions refer to the query of the last begin_query().

  void begin_query(std::uint32_t query);
  /// Adds what a query head sees of one set.
  void add(std::size_t set, std::uint32_t head, const QueryResult& result) {
    const std::size_t at = set * group_ + head;
    const SumTerms terms = terms_of(result);
    SumTerms& pending = sums_[at];
    for (std::size_t i = 0; i < kQuerySums; ++i)
      if (is_log_sum(i))
        pending.of[i] *= terms.of[i];
      else
        pending.of[i] += terms.of[i];
    newest_[at] = static_cast<float>(result.recall);
  }
  /// Adds how much of the attention to each passage the set holds. Only for a single set. `e` are
  /// the row's exponentials, `stride` floats apart, and `sum` is their sum. `tokens`: the positions
  /// of the set, ascending.
  void add_passages(std::uint32_t head, const float* e, std::size_t stride, double sum,
                    std::span<const std::uint32_t> tokens);
  /// Numbers of tokens in a query's selection.
  struct SelectionCounts {
    std::uint32_t fetched, selected;
    /// How many selected tokens are among the `selected` most probable tokens. Null if the
    /// selection consists of these tokens by definition.
    std::optional<std::uint32_t> agreed;
  };
  /// Adds what a query selects. Only for a single set.
  void add_selection(std::uint32_t head, const SelectionCounts& counts);
  /// Adds `error`, the squared norm of an output's error, and `size`, the squared norm of the full
  /// cache's output. `full` is the full cache's output [dim], and factor * kept is the output of
  /// the set. If these outputs are equal, `full` and `kept` are null.
  void add_output(std::size_t set, std::uint32_t head, double error, double size, const float* full,
                  const float* kept, float factor);
  /// Adds the error from quantization alone: factor * exact and factor * quantized are the outputs
  /// over the same tokens without and with quantization.
  void add_quantization(std::size_t set, std::uint32_t head, const float* exact,
                        const float* quantized, float factor) {
    projection_->add_residual(
        head, exact, quantized, factor,
        stats_[set].residual_of(measured_->sample(query_)) + projection_->columns().residual);
  }
  /// The changes of log-likelihood, [gradient sample], of the query. The caller adds to them.
  float* changes(std::size_t set, std::uint32_t gradient_samples) {
    return stats_[set].changes_of(measured_->index(query_), gradient_samples);
  }

  /// Call after the last query. Returns metrics by set.
  std::vector<HeadStats> take();

 private:
  double& sum(std::size_t set, Sum kind, std::uint32_t head) {
    return stats_[set].sums[shape_.at(kind, head, block_)];
  }
  void flush();

  const MeasuredQueries* measured_ = nullptr;
  const ErrorProjection* projection_ = nullptr;
  SumsShape shape_ = {};
  std::size_t group_ = 0;
  std::uint32_t together_ = 0, query_ = 0, block_ = 0, pending_ = 0;
  std::vector<HeadStats> stats_;  // [set]
  // [set, group]: sums of terms and products of factors over the last pending_ queries, which have
  // not been added to stats_ yet. The last of these queries is query_.
  std::vector<SumTerms> sums_;
  // Recalls are stored in tiles. A tile has the width of a CPU cache line or, if that is less, the
  // width of all recalls of one query.
  std::size_t width_ = 0, tiles_ = 0;
  std::vector<float> rows_;           // [query, tile, width]: recalls [set, group]
  float* newest_ = nullptr;           // the last query's row
  std::unique_ptr<float[]> recalls_;  // [tile, measured query, width]
};

}  // namespace kvlab
