// What live sets on one KV head come to, query by query: the metrics of the plain replay and of the
// configuration batches alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/metrics.hpp"

namespace kvlab {

class RowMeasure {
 public:
  /// Queries that may enter the sums together, with one logarithm: a product of so many recalls
  /// stays above 1e-288.
  static constexpr std::uint32_t kTogether = 32;

  RowMeasure() = default;
  /// `measured` may be null: nothing is measured. Both it and the view's projection must outlive
  /// this.
  RowMeasure(const MeasuredQueries* measured, std::size_t sets, const HeadView& view,
             std::uint32_t together = kTogether);

  /// Before the first query, of quantized tiers: add_quantization() will come.
  void separate_quantization() {
    for (HeadStats& stats : stats_) stats.residual.resize(2 * stats.residual.size());
  }
  /// Whether it is to come for a measured query.
  bool wants_quantization(std::uint32_t query) const {
    return samples(query) && !stats_.front().residual.empty();
  }

  bool measures(std::uint32_t query) const { return measured_ && measured_->contains(query); }
  /// Whether errors are taken of a measured query.
  bool samples(std::uint32_t query) const { return measured_->is_sampled(query); }

  // What follows is about the query of the last begin_query().

  void begin_query(std::uint32_t query);
  /// Once for all sets: so many tokens a query head requests.
  void add_wanted(std::uint32_t head, std::uint32_t wanted) { wanted_[head] += wanted; }
  /// What one set holds of a query head's row: `missed` of the wanted tokens are gone.
  void add(std::size_t set, std::uint32_t head, double recall, std::uint32_t missed) {
    const std::size_t at = set * group_ + head;
    recall_[at] += recall;
    product_[at] *= std::max(recall, kRecallFloor);
    missed_[at] += missed;
    newest_[at] = static_cast<float>(recall);
  }
  /// What sets hold of passages, from a row's exponentials, `stride` apart, and their sum. Set l
  /// holds tokens[0] to tokens[begins[l + 1] - 1], of which those from begins[l] on ascend.
  void add_passages(std::uint32_t head, const float* e, std::size_t stride, double sum,
                    const std::uint32_t* tokens, std::span<const std::size_t> begins);
  /// Squared norms of an output's error and of the full cache's output; and both vectors, [dim],
  /// the kept one to be multiplied by `factor`, or null where they are the same.
  void add_output(std::size_t set, std::uint32_t head, double error, double size, const float* full,
                  const float* kept, float factor);
  /// Outputs of the same tokens without quantization, and with quantization, to be multiplied by
  /// `factor`.
  void add_quantization(std::size_t set, std::uint32_t head, const float* exact,
                        const float* quantized, float factor) {
    projection_->add_residual(
        head, exact, quantized, factor,
        stats_[set].residual_of(measured_->sample(query_)) + projection_->columns().residual);
  }
  /// Changes of log-likelihood, [gradient sample], to be added to.
  float* changes(std::size_t set, std::uint32_t gradient_samples) {
    return stats_[set].changes_of(measured_->index(query_), gradient_samples);
  }

  /// After the last query: by set.
  std::vector<HeadStats> take();

 private:
  double& sum(std::size_t set, Sum of, std::uint32_t head) {
    return stats_[set].sums[shape_.at(of, head, block_)];
  }
  void flush();

  const MeasuredQueries* measured_ = nullptr;
  const ErrorProjection* projection_ = nullptr;
  SumsShape shape_ = {};
  std::size_t group_ = 0;
  std::uint32_t together_ = 0, query_ = 0, block_ = 0, pending_ = 0;
  std::vector<HeadStats> stats_;  // [set]
  // Of pending_ queries, the last of them query_.
  std::vector<double> recall_, product_;        // [set, group]: sums
  std::vector<std::uint32_t> missed_, wanted_;  // likewise; [group]
  // Recalls lie in tiles, as wide as a cache line or as all of a query's.
  std::size_t width_ = 0, tiles_ = 0;
  std::vector<float> rows_;           // [query, tile, width]: [set, group]
  float* newest_ = nullptr;           // the last query's
  std::unique_ptr<float[]> recalls_;  // [tile, measured query, width]
};

}  // namespace kvlab
