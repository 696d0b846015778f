#include "sim/metrics.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>

#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMinBlocks = 8;  // with fewer blocks, the estimated error is not reliable

/// The unweighted mean of value(i) for i < count, without the values that are NaN.
template <class Value>
double plain_mean(std::size_t count, Value value) {
  double sum = 0;
  std::size_t there = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double own = value(i);
    if (std::isnan(own)) continue;
    sum += own;
    ++there;
  }
  return there ? sum / static_cast<double>(there) : kNaN;
}

/// The mean of ratios without block `out`. If `out` is kMaxQueryBlocks, no block is left out.
double mean_without(std::span<const BlockedRatio> ratios, std::span<const double> above,
                    std::span<const double> below, std::size_t out) {
  return plain_mean(ratios.size(), [&](std::size_t r) {
    const bool cut = out < kMaxQueryBlocks;
    const double denominator = below[r] - (cut ? ratios[r].below[out] : 0);
    return denominator > 0 ? (above[r] - (cut ? ratios[r].above[out] : 0)) / denominator : kNaN;
  });
}

/// The jackknife variance of a statistic. replicates[i] is its value without the i-th part of the
/// data.
double jackknife(std::span<const double> replicates) {
  const auto n = static_cast<double>(replicates.size());
  const double mean = std::accumulate(replicates.begin(), replicates.end(), 0.0) / n;
  double squares = 0;
  for (const double x : replicates) squares += (x - mean) * (x - mean);
  return (n - 1) / n * squares;
}

/// Estimates, from a sample of the values, a range of bit patterns. The range very probably
/// contains the values at ranks [first, last) of the sorted values, and few other values.
std::pair<std::uint32_t, std::uint32_t> bounds_of(const float* values, std::size_t size,
                                                  std::size_t first, std::size_t last) {
  std::vector<std::uint32_t> some;
  for (std::size_t i = 0; i < size; i += 16)
    some.push_back(std::bit_cast<std::uint32_t>(values[i]));
  const auto begin = some.begin(), low = begin + some.size() * first / size * 3 / 4,
             high = std::min(begin + some.size() * last / size * 5 / 4 + 4, some.end() - 1);
  std::nth_element(begin, high, some.end());
  std::nth_element(begin, low, high);
  return {*low, *high};
}

/// The mean of ratios, and the means without each block and without each column of the sketch. The
/// mean without a block that has no weight is NaN.
struct Replicates {
  double mean, weight;
  std::vector<double> without;  // [block]
  std::vector<double> columns;  // means without each column of the sketch; empty if there is none

  Estimate estimate() const {
    std::vector<double> filled;
    std::ranges::copy_if(without, std::back_inserter(filled),
                         [](double x) { return !std::isnan(x); });
    const auto n = static_cast<double>(filled.size());
    std::vector<double> pseudo;
    for (const double x : without) pseudo.push_back(n * mean - (n - 1) * x);
    const double sketched = columns.empty() ? 0 : jackknife(columns);
    return {mean, filled.size() >= kMinBlocks ? std::sqrt(jackknife(filled) + sketched) : kNaN,
            weight, std::move(pseudo)};
  }
};

/// For each column of a sketch, the mean of ratios without this column.
std::vector<double> means_without_columns(std::span<const BlockedRatio> ratios,
                                          std::span<const double> above,
                                          std::span<const double> below) {
  const std::size_t columns = ratios.empty() ? 0 : ratios.front().columns.size();
  std::vector<double> means, left(above.size());
  for (std::size_t column = 0; column < columns; ++column) {
    for (std::size_t r = 0; r < left.size(); ++r)
      left[r] = (above[r] - ratios[r].columns[column]) * static_cast<double>(columns) /
                static_cast<double>(columns - 1);
    means.push_back(mean_without(ratios, left, below, kMaxQueryBlocks));
  }
  return means;
}

Replicates replicates_of(std::span<const BlockedRatio> ratios) {
  std::vector<double> above, below;
  for (const BlockedRatio& ratio : ratios) {
    above.push_back(std::accumulate(ratio.above.begin(), ratio.above.end(), 0.0));
    below.push_back(ratio.weight());
  }
  Replicates replicates{mean_without(ratios, above, below, kMaxQueryBlocks),
                        std::accumulate(below.begin(), below.end(), 0.0),
                        {},
                        means_without_columns(ratios, above, below)};
  for (std::size_t block = 0; !ratios.empty() && block < ratios.front().blocks; ++block) {
    const bool filled = std::ranges::any_of(
        ratios, [&](const BlockedRatio& ratio) { return ratio.below[block] > 0; });
    replicates.without.push_back(filled ? mean_without(ratios, above, below, block) : kNaN);
  }
  return replicates;
}

}  // namespace

MeasuredQueries::MeasuredQueries(const std::vector<Segment>& segments, Queries which,
                                 std::uint32_t sample_every, std::vector<Passage> named)
    : which_(which), every_(sample_every), named_(std::move(named)) {
  for (const Segment& segment : segments) {
    index_.resize(segment.start + segment.tokens, -1);
    if (which == Queries::decode && segment.kind != SegmentKind::decode) continue;
    for (std::uint32_t i = 0; i < segment.tokens; ++i)
      index_[segment.start + i] = static_cast<std::int32_t>(size_++);
  }
}

std::uint32_t MeasuredQueries::queries_after(const Passage& passage) const {
  const std::size_t first = std::min<std::size_t>(passage.start + passage.tokens, index_.size());
  return static_cast<std::uint32_t>(
      std::count_if(index_.begin() + static_cast<std::ptrdiff_t>(first), index_.end(),
                    [](std::int32_t index) { return index >= 0; }));
}

std::vector<std::uint32_t> MeasuredQueries::queries() const {
  std::vector<std::uint32_t> queries;
  for (std::uint32_t query = 0; query < index_.size(); ++query)
    if (contains(query)) queries.push_back(query);
  return queries;
}

std::vector<std::uint32_t> MeasuredQueries::sampled_queries() const {
  std::vector<std::uint32_t> queries = this->queries();
  std::erase_if(queries, [&](std::uint32_t query) { return !is_sampled(query); });
  return queries;
}

double BlockedRatio::weight() const { return std::accumulate(below.begin(), below.end(), 0.0); }

Estimate mean_of(std::span<const BlockedRatio> ratios) { return replicates_of(ratios).estimate(); }

Estimate difference_of(std::span<const BlockedRatio> ratios, std::span<const BlockedRatio> less) {
  Replicates difference = replicates_of(ratios);
  const Replicates other = replicates_of(less);
  difference.mean -= other.mean;
  for (std::size_t block = 0; block < difference.without.size(); ++block)
    difference.without[block] -= other.without[block];
  for (std::size_t column = 0; column < difference.columns.size(); ++column)
    difference.columns[column] -= other.columns[column];
  return difference.estimate();
}

Quantile quantile_of(const MeasuredQueries& measured, const float* values) {
  const auto rank = [](std::size_t count) { return (count - 1) / 10; };
  // The quantile of the values without one block has a rank among all values. Whichever block is
  // left out, this rank is in [first, last).
  const std::size_t size = measured.size(), block_size = size / measured.blocks() + 1,
                    first = size > block_size ? rank(size - block_size) : 0,
                    last = std::min(size, rank(size) + block_size + 1);
  // For each value within the bounds: its bits, which have the same order as the values, and its
  // block.
  const std::unique_ptr<std::uint64_t[]> order(new std::uint64_t[size]);
  std::array<std::size_t, kMaxQueryBlocks> before;  // number of smaller values, by block
  std::size_t skipped = size, count = 0;
  for (auto [low, high] = bounds_of(values, size, first, last);
       skipped > first || skipped + count < last; low = 0, high = ~0u) {
    skipped = count = 0;
    for (std::uint32_t block = 0, i = 0; block < measured.blocks(); ++block) {
      const std::uint32_t end = i + measured.queries_in(block);
      before[block] = static_cast<std::size_t>(
          std::count_if(values + i, values + end,
                        [less = std::bit_cast<float>(low)](float x) { return x < less; }));
      for (; i < end; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(values[i]);
        order[count] = std::uint64_t{bits} << 32 | block;
        count += bits - low <= high - low ? 1 : 0;
      }
      skipped += before[block];
    }
  }
  // Returns the address of the i-th smallest value. Only the values from `first` to `sorted` are
  // sorted, because later values are rarely needed.
  const auto at = [&](std::size_t i) { return order.get() + (i - skipped); };
  std::nth_element(at(skipped), at(first), at(skipped + count));
  for (std::size_t i = skipped; i < first; ++i) ++before[*at(i) % kMaxQueryBlocks];
  std::size_t sorted = first;
  const auto sort_to = [&](std::size_t end) {
    std::nth_element(at(sorted), at(end - 1), at(skipped + count));
    std::sort(at(sorted), at(end));
    sorted = end;
  };
  sort_to((first + last + 1) / 2);
  const auto value = [&](std::size_t i) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(*at(i) >> 32));
  };
  Quantile quantile{value(rank(size)), {}};
  quantile.without.fill(kNaN);
  for (std::uint32_t block = 0; block < measured.blocks(); ++block) {
    if (measured.queries_in(block) == size) continue;
    std::size_t i = first;
    for (auto left = rank(size - measured.queries_in(block)) + before[block] - first;; ++i) {
      if (i == sorted) sort_to(last);
      if (*at(i) % kMaxQueryBlocks != block && left-- == 0) break;
    }
    quantile.without[block] = value(i);
  }
  return quantile;
}

Estimate mean_of(std::span<const Quantile> quantiles, std::size_t blocks, double weight) {
  const auto mean = [&](auto value) {
    return plain_mean(quantiles.size(), [&](std::size_t i) { return value(quantiles[i]); });
  };
  Replicates replicates{mean([](const Quantile& own) { return own.value; }), weight, {}, {}};
  for (std::size_t block = 0; block < blocks; ++block)
    replicates.without.push_back(mean([&](const Quantile& own) { return own.without[block]; }));
  return replicates.estimate();
}

void HeadStats::resize(const MeasuredQueries& measured, std::uint32_t group,
                       const ProjectionColumns& columns) {
  const SumsShape shape = measured.sums(group);
  sums.resize(static_cast<std::size_t>(shape.size()));
  for (std::uint32_t head = 0; head < group; ++head)
    for (std::uint32_t block = 0; block < measured.blocks(); ++block)
      sums[shape.at(Sum::queries, head, block)] = measured.queries_in(block);
  quantiles.resize(group);
  errors.resize(std::size_t{measured.samples()} * 2);
  residual.resize(std::size_t{measured.samples()} * columns.residual);
  changes.resize(std::size_t{measured.size()} * columns.gradient_samples);
}

void HeadStats::take_recalls(const MeasuredQueries& measured, const float* recalls) {
  for (std::size_t head = 0; head < quantiles.size(); ++head)
    quantiles[head] = quantile_of(measured, recalls + head * measured.size());
}

bool HeadStats::fits(const MeasuredQueries& measured, std::uint32_t group,
                     const ProjectionColumns& columns) const {
  return sums.size() == measured.sums(group).size() && quantiles.size() == group &&
         errors.size() == std::size_t{measured.samples()} * 2 &&
         (residual.empty() || separates_quantization(columns.residual) ||
          residual.size() == std::size_t{measured.samples()} * columns.residual) &&
         (changes.empty() ||
          changes.size() == std::size_t{measured.size()} * columns.gradient_samples);
}

}  // namespace kvlab
