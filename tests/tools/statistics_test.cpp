// Tests of rank correlations, quantiles and the bootstrap.
#include "engine/evaluation/statistics.hpp"

#include <cmath>
#include <numeric>

#include "tests/catch.hpp"

namespace kvlab {
namespace {

using Values = std::vector<double>;

TEST_CASE("Spearman's rho, with ties") {
  const Values up{1, 2, 3, 4}, down{9, 7, 5, 3}, ties{1, 1, 2, 2};
  CHECK(spearman(up, up) == Approx(1));
  CHECK(spearman(up, down) == Approx(-1));
  CHECK(spearman(up, ties) == Approx(4 / std::sqrt(20.0)));  // ranks 0.5 0.5 2.5 2.5
  CHECK(std::isnan(spearman(up, Values{5, 5, 5, 5})));
}

TEST_CASE("A quantile between two values is interpolated") {
  const Values values{5, 1, 3, 2, 4};
  CHECK(quantile(values, 0) == 1);
  CHECK(quantile(values, 0.5) == 3);
  CHECK(quantile(values, 0.9) == Approx(4.6));
  CHECK(quantile(values, 1) == 5);
  CHECK(quantile({7}, 0.99) == 7);
  CHECK(std::isnan(quantile({}, 0.5)));
}

TEST_CASE("One text gives no standard deviation") {
  CHECK(spread_of(Values{1, 3}).mean == 2);
  CHECK(spread_of(Values{1, 3}).deviation == Approx(std::sqrt(2.0)));
  CHECK(std::isnan(spread_of(Values{1}).deviation));
}

TEST_CASE("Resampled items give the percentiles of a statistic") {
  Values items(100);
  std::iota(items.begin(), items.end(), 0.0);
  const auto mean = [&](std::span<const std::size_t> which) {
    double sum = 0;
    for (const std::size_t item : which) sum += items[item];
    return sum / static_cast<double>(which.size());
  };
  const Interval interval = bootstrap(items.size(), mean);
  CHECK(interval.low == Approx(49.5 - 1.96 * 2.887).margin(0.7));
  CHECK(interval.high == Approx(49.5 + 1.96 * 2.887).margin(0.7));
  CHECK(std::isnan(bootstrap(1, mean).low));
}

}  // namespace
}  // namespace kvlab
