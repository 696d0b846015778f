// Statistics of scores: ranks, quantiles, and the bootstrap by which all commands say what can be
// told apart.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace kvlab {

struct Interval {
  double low, high;
};

/// Spearman's rank correlation, equal values sharing their mean rank; NaN where one side is
/// constant.
double spearman(std::span<const double> a, std::span<const double> b);

/// The value that `share` (0 … 1) of the values do not exceed, in proportion between neighbours;
/// NaN of none.
double quantile(std::vector<double> values, double share);

/// The mean and the standard deviation of one value a text, say; the deviation is NaN of one.
struct Spread {
  double mean, deviation;
};
Spread spread_of(std::span<const double> values);

/// 95% of what `statistic` gives for items [0, count) drawn anew, with replacement: the percentiles
/// of its finite values. NaN for fewer than two items, or where it is never finite. The same draws
/// each time.
Interval bootstrap(std::size_t count,
                   const std::function<double(std::span<const std::size_t>)>& statistic);

/// Scores by token of several configurations over the same tokens, as sums over blocks of
/// neighbours: what one token scores is not independent of the next.
class ScoreBlocks {
 public:
  static constexpr std::size_t kTokens = 64;  ///< of a block

  explicit ScoreBlocks(std::size_t configurations) : sums_(configurations) {}

  /// So many tokens that `total` make 16 blocks, if they can; kTokens at most.
  static std::size_t block_tokens(std::size_t total);
  /// One sequence's scores [configuration][token], cut into blocks of so many tokens.
  void add(std::span<const std::span<const double>> scores, std::size_t tokens);

  std::size_t blocks() const { return tokens_.size(); }
  std::size_t configurations() const { return sums_.size(); }
  double sum(std::size_t configuration, std::size_t block) const {
    return sums_[configuration][block];
  }
  double tokens(std::size_t block) const { return tokens_[block]; }

 private:
  std::vector<std::vector<double>> sums_;  // [configuration][block]
  std::vector<double> tokens_;             // [block]
};

/// One mean less another, over the same tokens.
struct Difference {
  double mean;
  Interval interval;  ///< 95%; NaN of fewer than eight blocks

  /// Whether zero lies outside the interval. Otherwise the two cannot be told apart.
  bool told_apart() const { return interval.low > 0 || interval.high < 0; }
  bool ahead() const { return interval.high < 0; }  ///< the first is less, and can be told apart
};

/// The block bootstrap: means of every configuration over the same draws of blocks, so that
/// differences are paired.
class PairedBootstrap {
 public:
  explicit PairedBootstrap(const ScoreBlocks& blocks);

  double mean(std::size_t configuration) const { return means_[configuration]; }
  Difference difference(std::size_t a, std::size_t b) const;

 private:
  std::vector<double> means_;
  std::vector<std::vector<double>> drawn_;  // [configuration][draw]; empty of too few blocks
};

}  // namespace kvlab
