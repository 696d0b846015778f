// What is measured: sums by block of queries, so that every figure has a standard error.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/error_projection.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// The queries that figures are taken over, in order; errors of outputs on a sample of them.
class QuerySpan {
 public:
  /// `sample_every`: errors on every such query of the span. `named`: tokens that `span_recall` is
  /// about.
  QuerySpan(const std::vector<Segment>& segments, Span span, std::uint32_t sample_every,
            std::vector<NamedSpan> named = {});

  Span span() const { return span_; }
  std::uint32_t size() const { return size_; }
  std::uint32_t samples() const { return (size_ + every_ - 1) / every_; }
  bool contains(std::uint32_t query) const { return query < index_.size() && index_[query] >= 0; }
  /// Which query of the span this one is.
  std::uint32_t index(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]);
  }
  bool sampled(std::uint32_t query) const { return index_[query] % every_ == 0; }
  /// Which sample this sampled query is.
  std::uint32_t sample(std::uint32_t query) const {
    return static_cast<std::uint32_t>(index_[query]) / every_;
  }
  /// Contiguous blocks of queries, for standard errors: 16, or as many as there are queries.
  std::uint32_t blocks() const { return std::min(size_, 16u); }
  std::uint32_t block(std::uint32_t query) const {
    return block_of(static_cast<std::uint32_t>(index_[query]));
  }
  std::uint32_t block_of_sample(std::uint32_t sample) const { return block_of(sample * every_); }
  /// Of the i-th query of the span.
  std::uint32_t block_of(std::uint32_t i) const {
    return static_cast<std::uint32_t>(std::uint64_t{i} * blocks() / size_);
  }
  std::uint32_t sample_every() const { return every_; }
  const std::vector<NamedSpan>& named() const { return named_; }
  /// Measured queries behind a named span.
  std::uint32_t queries_after(const NamedSpan& span) const;
  /// The positions of all queries, and of those that are sampled.
  std::vector<std::uint32_t> queries() const;
  std::vector<std::uint32_t> sampled_queries() const;
  /// Where the figures of a sampled query go.
  struct Place {
    std::uint32_t sample, block;
  };
  Place place(std::uint32_t query) const { return {sample(query), block(query)}; }

 private:
  std::vector<std::int32_t> index_;  // [token]: which query of the span, or -1
  Span span_;
  std::uint32_t size_ = 0, every_;
  std::vector<NamedSpan> named_;
};

/// A ratio of sums, by block: a mean (weights 1), or misses per request.
struct BlockedRatio {
  std::vector<double> above, below;  // [block]
  /// Of all blocks, by the column of a sketch that `above` is a sum over; or empty.
  std::vector<double> columns;

  void resize(std::uint32_t blocks) { above.resize(blocks), below.resize(blocks); }
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
Estimate mean_of(std::span<const BlockedRatio* const> ratios);
/// One such mean less another, over the same queries: the error is that of the difference.
Estimate difference_of(std::span<const BlockedRatio* const> ratios,
                       std::span<const BlockedRatio* const> less);

/// nll_recall takes the logarithm of no less than this.
inline constexpr double kRecallFloor = 1e-9;

/// One configuration's figures on one KV head.
struct HeadStats {
  struct PerQueryHead {
    BlockedRatio recall, nll, miss, error;
    std::vector<BlockedRatio> spans;  ///< by named span: what is kept of its probability, and all
    std::uint64_t zero_outputs = 0;
  };
  std::vector<PerQueryHead> heads;      // [group]
  std::vector<double> error2, output2;  // [sample]: sums over the group of squared norms
  // Summed over the group; empty where none are taken.
  std::vector<float> residual;  ///< [sample, column]: errors behind W_o
  std::vector<float> changes;   ///< [query of the span, draw]: of log-likelihood

  void resize(const QuerySpan& span, std::uint32_t group, const ProjectionColumns& columns = {});
  /// Whether this has the size that resize() gives, or nothing of an ErrorProjection.
  bool fits(const QuerySpan& span, std::uint32_t group, const ProjectionColumns& columns) const;
  float* residual_of(std::uint32_t sample) {
    return residual.data() + sample * (residual.size() / error2.size());
  }
  /// Of the `index`-th query of the span.
  float* changes_of(std::size_t index, std::uint32_t draws) {
    return changes.data() + index * draws;
  }
  void add_recall(std::uint32_t block, std::uint32_t head, double recall);
  /// `full` and `kept`: attention outputs of the full cache and of the kept set, [dim].
  void add_outputs(const QuerySpan& span, std::uint32_t query, std::uint32_t head,
                   std::span<const float> full, std::span<const float> kept);
  /// Adds outputs by their squared norms: of the difference, and of the full cache's output.
  void add_error(QuerySpan::Place place, std::uint32_t head, double error, double size);
};

/// What a configuration leaves behind on one KV head.
struct HeadOutcome {
  HeadStats stats;
  std::uint64_t evictions = 0, live_max = 0, live_end = 0;
};

}  // namespace kvlab
