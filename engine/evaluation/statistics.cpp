#include "engine/evaluation/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

constexpr int kResamples = 2000;

using Values = std::vector<double>;

Values ranks_of(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  Values ranks(values.size());
  for (std::size_t first = 0; first < order.size();) {
    std::size_t end = first;
    while (end < order.size() && values[order[end]] == values[order[first]]) ++end;
    for (std::size_t i = first; i < end; ++i)
      ranks[order[i]] = static_cast<double>(first + end - 1) / 2;
    first = end;
  }
  return ranks;
}

/// Resamples of `count` items with replacement. They are the same in each run of the program.
class Resamples {
 public:
  explicit Resamples(std::size_t count) : items_(count) {}
  const std::vector<std::size_t>& next() {
    for (std::size_t& item : items_) item = random_() % items_.size();
    return items_;
  }

 private:
  std::mt19937_64 random_{1};
  std::vector<std::size_t> items_;
};

/// The interval of the middle 95% of the values.
Interval middle_of(Values values) {
  return {quantile(values, 0.025), quantile(std::move(values), 0.975)};
}

}  // namespace

double spearman(std::span<const double> a, std::span<const double> b) {
  const Values x = ranks_of(a), y = ranks_of(b);
  const double mean = static_cast<double>(x.size() - 1) / 2;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : kNaN;
}

double quantile(Values values, double share) {
  if (values.empty()) return kNaN;
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(below);
  std::nth_element(values.begin(), at, values.end());
  const double low = *at;
  if (below + 1 == values.size()) return low;
  const double high = *std::min_element(at + 1, values.end());
  return low + (place - static_cast<double>(below)) * (high - low);
}

Spread spread_of(std::span<const double> values) {
  const auto count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {mean, values.size() < 2 ? kNaN : std::sqrt(squares / (count - 1))};
}

Interval bootstrap(std::size_t count,
                   const std::function<double(std::span<const std::size_t>)>& statistic) {
  Values values;
  if (count < 2) return {kNaN, kNaN};
  Resamples resamples(count);
  for (int resample = 0; resample < kResamples; ++resample)
    if (const double value = statistic(resamples.next()); std::isfinite(value))
      values.push_back(value);
  return middle_of(std::move(values));
}

}  // namespace kvlab
