// The queries at which metrics are measured, and metrics as ratios of sums. There is a sum for each
// block of queries, from which the standard error of a metric is computed.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/error_projection.hpp"
#include "sim/metrics/sums.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// The queries at which metrics are measured, in order. Errors of outputs are measured only at a
/// sample of them.
class MeasuredQueries {
 public:
  /// `sample_every`: errors are measured only at every sample_every-th measured query. `named`: the
  /// passages for which the metric `passage_recall` is computed.
  MeasuredQueries(const std::vector<Segment>& segments, Queries which, std::uint32_t sample_every,
                  std::vector<Passage> named = {});

  Queries which() const { return which_; }
  std::uint32_t size() const { return size_; }
  std::uint32_t samples() const { return (size_ + every_ - 1) / every_; }
  bool contains(std::uint32_t query) const { return query < index_.size() && index_[query] >= 0; }
  /// Index of the query among the measured queries.
  std::uint32_t index(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]);
  }
  bool is_sampled(std::uint32_t query) const { return index_[query] % every_ == 0; }
  /// Index of a sampled query among the samples.
  std::uint32_t sample(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]) / every_;
  }
  /// Number of contiguous blocks of queries, for standard errors: 16, or the number of queries if
  /// that is smaller.
  std::uint32_t blocks() const { return std::min(size_, kMaxQueryBlocks); }
  std::uint32_t block(std::uint32_t query) const {
    return block_of(static_cast<std::uint32_t>(index_[query]));
  }
  std::uint32_t block_of_sample(std::uint32_t sample) const { return block_of(sample * every_); }
  /// Block of the i-th measured query.
  std::uint32_t block_of(std::uint32_t i) const {
    return static_cast<std::uint32_t>(std::uint64_t{i} * blocks() / size_);
  }
  std::uint32_t queries_in(std::uint32_t block) const {
    return first_of(block + 1) - first_of(block);
  }
  std::uint32_t sample_every() const { return every_; }
  const std::vector<Passage>& passages() const { return named_; }
  /// Shape of a KV head's sums.
  SumsShape sums(std::uint32_t group) const { return {(group + 3) / 4, named_.size()}; }
  /// Number of measured queries that come after a passage.
  std::uint32_t queries_after(const Passage& passage) const;
  /// Positions of all measured queries. sampled_queries() returns the positions of the sampled
  /// queries.
  std::vector<std::uint32_t> queries() const;
  std::vector<std::uint32_t> sampled_queries() const;

 private:
  std::uint32_t first_of(std::uint32_t block) const {
    return static_cast<std::uint32_t>((std::uint64_t{block} * size_ + blocks() - 1) / blocks());
  }

  std::vector<std::int32_t> index_;  // [token]: index of the measured query, or -1
  Queries which_;
  std::uint32_t size_ = 0, every_;
  std::vector<Passage> named_;
};

/// A ratio of two sums, with a part of each sum for every block of queries. Examples: a mean (the
/// denominator counts the queries), or the misses per request.
struct BlockedRatio {
  using Blocks = std::array<double, kMaxQueryBlocks>;
  std::size_t blocks = 0;
  Blocks above = {}, below = {};
  /// The parts of the numerator for each column of the sketch, summed over all blocks; empty if the
  /// ratio has no sketch.
  std::vector<double> columns = {};

  void add(std::uint32_t block, double numerator, double denominator) {
    above[block] += numerator;
    below[block] += denominator;
  }
  double weight() const;
};

/// The unweighted mean of ratios, which are those of query heads or layers. Its standard error is
/// computed by a jackknife over blocks of queries and, if there is a sketch, over the columns of
/// the sketch. A ratio whose denominator is 0 has no weight and is left out.
struct Estimate {
  /// NaN if no ratio has weight. The error is also NaN if there are fewer than 8 blocks.
  double value, standard_error;
  double weight;  ///< total weight of the ratios
  /// [block]: the pseudo-values of the jackknife, from which value and error are computed; NaN for
  /// a block without weight. They are used to compare two configurations in pairs.
  std::vector<double> blocks;
};
Estimate mean_of(std::span<const BlockedRatio> ratios);
/// The mean of `ratios` minus the mean of `less`, over the same queries, with the standard error of
/// this difference.
Estimate difference_of(std::span<const BlockedRatio> ratios, std::span<const BlockedRatio> less);

/// A query head's 10% quantile: the (n + 9) / 10-th smallest of n values.
struct Quantile {
  double value;
  BlockedRatio::Blocks without;  ///< the quantile without each block; NaN if no values remain
};
/// The quantile of `values` [measured query], which must not be negative.
Quantile quantile_of(const MeasuredQueries& measured, const float* values);
/// The unweighted mean of quantiles. `weight`: their total weight.
Estimate mean_of(std::span<const Quantile> quantiles, std::size_t blocks, double weight);

/// One configuration's metrics on one KV head.
struct HeadStats {
  std::vector<double> sums;         ///< layout: SumsShape
  std::vector<Quantile> quantiles;  ///< of recall, by query head
  /// [sample, 2]: squared error and squared output, summed over the group
  std::vector<double> errors;
  // The following arrays are summed over the query heads of the group. An array that is not
  // measured is empty.
  /// [sample, column]: errors after W_o. With quantized tiers the array is [sample, 2, column]:
  /// entry 0 is the whole error, entry 1 the error from quantization alone.
  std::vector<float> residual;
  std::vector<float> changes;  ///< [measured query, gradient sample]: changes of log-likelihood

  void resize(const MeasuredQueries& measured, std::uint32_t group,
              const ProjectionColumns& columns = {});
  /// Computes the quantiles of recalls [query head, measured query].
  void take_recalls(const MeasuredQueries& measured, const float* recalls);
  /// Whether the arrays have the sizes that resize() sets, with or without those that need an
  /// ErrorProjection.
  bool fits(const MeasuredQueries& measured, std::uint32_t group,
            const ProjectionColumns& columns) const;
  float* residual_of(std::uint32_t sample) {
    return residual.data() + sample * (residual.size() * 2 / errors.size());
  }
  /// Whether the errors from quantization alone are stored too.
  bool separates_quantization(std::size_t columns) const {
    return columns > 0 && residual.size() == errors.size() * columns;
  }
  /// Changes at the `index`-th measured query.
  float* changes_of(std::size_t index, std::uint32_t gradient_samples) {
    return changes.data() + index * gradient_samples;
  }
};

/// The result of a configuration on one KV head.
struct HeadOutcome {
  HeadStats stats;
  std::uint64_t evictions = 0, live_max = 0, live_end = 0;
  /// With refetch, in the outcome of the first configuration: lru_fetches() of the KV head.
  std::vector<std::uint64_t> lru_fetches = {};
};

}  // namespace kvlab
