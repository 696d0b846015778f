// What is measured: sums by block of queries, so that every metric has a standard error.
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

/// The queries that metrics are taken over, in order; errors of outputs on a sample of them.
class MeasuredQueries {
 public:
  /// `sample_every`: errors on every such measured query. `named`: tokens that `passage_recall` is
  /// about.
  MeasuredQueries(const std::vector<Segment>& segments, Queries which, std::uint32_t sample_every,
                  std::vector<Passage> named = {});

  Queries which() const { return which_; }
  std::uint32_t size() const { return size_; }
  std::uint32_t samples() const { return (size_ + every_ - 1) / every_; }
  bool contains(std::uint32_t query) const { return query < index_.size() && index_[query] >= 0; }
  /// Which measured query this one is.
  std::uint32_t index(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]);
  }
  bool is_sampled(std::uint32_t query) const { return index_[query] % every_ == 0; }
  /// Which sample this sampled query is.
  std::uint32_t sample(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]) / every_;
  }
  /// Contiguous blocks of queries, for standard errors: 16, or as many as there are queries.
  std::uint32_t blocks() const { return std::min(size_, kMaxQueryBlocks); }
  std::uint32_t block(std::uint32_t query) const {
    return block_of(static_cast<std::uint32_t>(index_[query]));
  }
  std::uint32_t block_of_sample(std::uint32_t sample) const { return block_of(sample * every_); }
  /// Of the i-th measured query.
  std::uint32_t block_of(std::uint32_t i) const {
    return static_cast<std::uint32_t>(std::uint64_t{i} * blocks() / size_);
  }
  std::uint32_t queries_in(std::uint32_t block) const {
    return first_of(block + 1) - first_of(block);
  }
  std::uint32_t sample_every() const { return every_; }
  const std::vector<Passage>& passages() const { return named_; }
  /// Of a KV head's sums.
  SumsShape sums(std::uint32_t group) const { return {(group + 3) / 4, named_.size()}; }
  /// Measured queries behind a passage.
  std::uint32_t queries_after(const Passage& passage) const;
  /// The positions of all queries, and of those that are sampled.
  std::vector<std::uint32_t> queries() const;
  std::vector<std::uint32_t> sampled_queries() const;

 private:
  std::uint32_t first_of(std::uint32_t block) const {
    return static_cast<std::uint32_t>((std::uint64_t{block} * size_ + blocks() - 1) / blocks());
  }

  std::vector<std::int32_t> index_;  // [token]: which measured query, or -1
  Queries which_;
  std::uint32_t size_ = 0, every_;
  std::vector<Passage> named_;
};

/// A ratio of sums, by block: a mean (weights 1), or misses per request.
struct BlockedRatio {
  using Blocks = std::array<double, kMaxQueryBlocks>;
  std::size_t blocks = 0;
  Blocks above = {}, below = {};
  /// Of all blocks, by the column of a sketch that `above` is a sum over; or empty.
  std::vector<double> columns = {};

  void add(std::uint32_t block, double numerator, double denominator) {
    above[block] += numerator;
    below[block] += denominator;
  }
  double weight() const;
};

/// A plain mean of ratios (over query heads, or layers), with its jackknife error over blocks and,
/// of a sketch, over its columns. Ratios without weight are left out.
struct Estimate {
  double value, standard_error;  ///< NaN: no ratio has weight; fewer than 8 blocks
  double weight;                 ///< of all ratios together
  /// The jackknife's pseudo-values [block], whose mean and error are about these; NaN of a block
  /// without weight. What two configurations are paired by.
  std::vector<double> blocks;
};
Estimate mean_of(std::span<const BlockedRatio> ratios);
/// One such mean less another, over the same queries: the error is that of the difference.
Estimate difference_of(std::span<const BlockedRatio> ratios, std::span<const BlockedRatio> less);

/// A query head's 10% quantile: of the n values the (n + 9) / 10-th smallest.
struct Quantile {
  double value;
  BlockedRatio::Blocks without;  ///< with each block left out; NaN: nothing is left
};
/// `values` [measured query], none of them negative.
Quantile quantile_of(const MeasuredQueries& measured, const float* values);
/// The plain mean of quantiles; `weight`: of all.
Estimate mean_of(std::span<const Quantile> quantiles, std::size_t blocks, double weight);

/// nll_recall takes the logarithm of no less than this.
inline constexpr double kRecallFloor = 1e-9;

/// One configuration's metrics on one KV head.
struct HeadStats {
  std::vector<double> sums;         ///< SumsShape
  std::vector<Quantile> quantiles;  ///< of recall, by query head
  std::vector<double> errors;       ///< [sample, 2]: squared, group summed: error, output
  // Summed over the group; empty where none are taken.
  /// [sample, column]: errors behind W_o; on tiers of quantized values [sample, 2, column]: and
  /// what quantization alone changes.
  std::vector<float> residual;
  std::vector<float> changes;  ///< [measured query, gradient sample]: of log-likelihood

  void resize(const MeasuredQueries& measured, std::uint32_t group,
              const ProjectionColumns& columns = {});
  /// The quantiles of recalls [query head, measured query].
  void take_recalls(const MeasuredQueries& measured, const float* recalls);
  /// Whether this has the size that resize() gives, or nothing of an ErrorProjection.
  bool fits(const MeasuredQueries& measured, std::uint32_t group,
            const ProjectionColumns& columns) const;
  float* residual_of(std::uint32_t sample) {
    return residual.data() + sample * (residual.size() * 2 / errors.size());
  }
  /// Whether what quantization changes is there too.
  bool separates_quantization(std::size_t columns) const {
    return columns > 0 && residual.size() == errors.size() * columns;
  }
  /// Of the `index`-th measured query.
  float* changes_of(std::size_t index, std::uint32_t gradient_samples) {
    return changes.data() + index * gradient_samples;
  }
};

/// What a configuration leaves behind on one KV head.
struct HeadOutcome {
  HeadStats stats;
  std::uint64_t evictions = 0, live_max = 0, live_end = 0;
};

}  // namespace kvlab
