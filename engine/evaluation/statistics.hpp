// Statistics of scores: rank correlation, quantiles, and the bootstrap for statistics without a
// closed form.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "sim/run/comparison.hpp"

namespace kvlab {

/// Spearman's rank correlation. Equal values share their mean rank. NaN if all values of one side
/// are equal.
double spearman(std::span<const double> a, std::span<const double> b);

/// The quantile at `share` (0 to 1), interpolated linearly between neighbours. NaN for no values.
double quantile(std::vector<double> values, double share);

/// Mean and standard deviation of values. The deviation of one value is NaN.
struct Spread {
  double mean, deviation;
};
Spread spread_of(std::span<const double> values);

/// The 95% bootstrap interval of `statistic` over items [0, count): percentiles of its finite
/// values over resamples with replacement. NaN if there are fewer than two items, or if the
/// statistic is never finite. The resamples are the same in each call.
Interval bootstrap(std::size_t count,
                   const std::function<double(std::span<const std::size_t>)>& statistic);

}  // namespace kvlab
