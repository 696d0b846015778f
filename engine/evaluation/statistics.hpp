// Statistics of scores: ranks, quantiles, and the bootstrap of what has no closed form.
// Significance: sim/run/comparison.hpp.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "sim/run/comparison.hpp"

namespace kvlab {

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

/// 95% of what `statistic` gives for items [0, count) resampled with replacement: the percentiles
/// of its finite values. NaN for fewer than two items, or where it is never finite. The same
/// resamples each time.
Interval bootstrap(std::size_t count,
                   const std::function<double(std::span<const std::size_t>)>& statistic);

}  // namespace kvlab
