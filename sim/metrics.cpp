#include "sim/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

namespace kvlab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kLeastBlocks = 8;  // fewer say too little about the error

/// The mean of ratios with block `out` left out (none: out == blocks).
double mean_without(std::span<const BlockedRatio* const> ratios, std::span<const double> above,
                    std::span<const double> below, std::size_t out) {
  double sum = 0;
  std::size_t count = 0;
  for (std::size_t r = 0; r < ratios.size(); ++r) {
    const bool cut = out < ratios[r]->above.size();
    const double numerator = above[r] - (cut ? ratios[r]->above[out] : 0);
    const double denominator = below[r] - (cut ? ratios[r]->below[out] : 0);
    if (denominator <= 0) continue;
    sum += numerator / denominator;
    ++count;
  }
  return count ? sum / static_cast<double>(count) : kNaN;
}

/// The variance of what these are of, each with one part left out.
double jackknife(std::span<const double> replicates) {
  const auto n = static_cast<double>(replicates.size());
  const double mean = std::accumulate(replicates.begin(), replicates.end(), 0.0) / n;
  double squares = 0;
  for (const double x : replicates) squares += (x - mean) * (x - mean);
  return (n - 1) / n * squares;
}

/// The mean of ratios, and with each block left out: NaN of one without weight.
struct Replicates {
  double mean, weight;
  std::vector<double> without;  // [block]
  std::vector<double> columns;  // with each column of a sketch left out; or empty

  Estimate estimate() const {
    std::vector<double> filled;
    std::ranges::copy_if(without, std::back_inserter(filled),
                         [](double x) { return !std::isnan(x); });
    const auto n = static_cast<double>(filled.size());
    std::vector<double> pseudo;
    for (const double x : without) pseudo.push_back(n * mean - (n - 1) * x);
    const double sketched = columns.empty() ? 0 : jackknife(columns);
    return {mean, filled.size() >= kLeastBlocks ? std::sqrt(jackknife(filled) + sketched) : kNaN,
            weight, std::move(pseudo)};
  }
};

/// The mean of ratios from all columns of a sketch but one, as many times as there are columns.
std::vector<double> means_without_columns(std::span<const BlockedRatio* const> ratios,
                                          std::span<const double> above,
                                          std::span<const double> below) {
  const std::size_t columns = ratios.empty() ? 0 : ratios.front()->columns.size();
  std::vector<double> means, left(above.size());
  for (std::size_t column = 0; column < columns; ++column) {
    for (std::size_t r = 0; r < left.size(); ++r)
      left[r] = (above[r] - ratios[r]->columns[column]) * static_cast<double>(columns) /
                static_cast<double>(columns - 1);
    means.push_back(mean_without(ratios, left, below, ratios.front()->above.size()));
  }
  return means;
}

Replicates replicates_of(std::span<const BlockedRatio* const> ratios) {
  std::vector<double> above, below;
  std::size_t blocks = 0;
  for (const BlockedRatio* ratio : ratios) {
    above.push_back(std::accumulate(ratio->above.begin(), ratio->above.end(), 0.0));
    below.push_back(ratio->weight());
    blocks = std::max(blocks, ratio->above.size());
  }
  Replicates replicates{mean_without(ratios, above, below, blocks),
                        std::accumulate(below.begin(), below.end(), 0.0),
                        {},
                        means_without_columns(ratios, above, below)};
  for (std::size_t block = 0; block < blocks; ++block) {
    const bool filled = std::any_of(ratios.begin(), ratios.end(), [&](const BlockedRatio* ratio) {
      return ratio->below[block] > 0;
    });
    replicates.without.push_back(filled ? mean_without(ratios, above, below, block) : kNaN);
  }
  return replicates;
}

}  // namespace

QuerySpan::QuerySpan(const std::vector<Segment>& segments, Span span, std::uint32_t sample_every,
                     std::vector<NamedSpan> named)
    : span_(span), every_(sample_every), named_(std::move(named)) {
  for (const Segment& segment : segments) {
    index_.resize(segment.start + segment.tokens, -1);
    if (span == Span::decode && segment.kind != SegmentKind::decode) continue;
    for (std::uint32_t i = 0; i < segment.tokens; ++i)
      index_[segment.start + i] = static_cast<std::int32_t>(size_++);
  }
}

std::uint32_t QuerySpan::queries_after(const NamedSpan& span) const {
  const std::size_t first = std::min<std::size_t>(span.start + span.tokens, index_.size());
  return static_cast<std::uint32_t>(
      std::count_if(index_.begin() + static_cast<std::ptrdiff_t>(first), index_.end(),
                    [](std::int32_t index) { return index >= 0; }));
}

std::vector<std::uint32_t> QuerySpan::queries() const {
  std::vector<std::uint32_t> queries;
  for (std::uint32_t query = 0; query < index_.size(); ++query)
    if (contains(query)) queries.push_back(query);
  return queries;
}

std::vector<std::uint32_t> QuerySpan::sampled_queries() const {
  std::vector<std::uint32_t> queries = this->queries();
  std::erase_if(queries, [&](std::uint32_t query) { return !sampled(query); });
  return queries;
}

double BlockedRatio::weight() const { return std::accumulate(below.begin(), below.end(), 0.0); }

Estimate mean_of(std::span<const BlockedRatio* const> ratios) {
  return replicates_of(ratios).estimate();
}

Estimate difference_of(std::span<const BlockedRatio* const> ratios,
                       std::span<const BlockedRatio* const> less) {
  Replicates difference = replicates_of(ratios);
  const Replicates other = replicates_of(less);
  difference.mean -= other.mean;
  for (std::size_t block = 0; block < difference.without.size(); ++block)
    difference.without[block] -= other.without[block];
  for (std::size_t column = 0; column < difference.columns.size(); ++column)
    difference.columns[column] -= other.columns[column];
  return difference.estimate();
}

void HeadStats::resize(const QuerySpan& span, std::uint32_t group,
                       const ProjectionColumns& columns) {
  heads.resize(group);
  for (PerQueryHead& head : heads) {
    for (BlockedRatio* ratio : {&head.recall, &head.nll, &head.miss, &head.error})
      ratio->resize(span.blocks());
    head.spans.resize(span.named().size());
    for (BlockedRatio& ratio : head.spans) ratio.resize(span.blocks());
  }
  error2.resize(span.samples());
  output2.resize(span.samples());
  residual.resize(std::size_t{span.samples()} * columns.residual);
  changes.resize(std::size_t{span.size()} * columns.draws);
}

bool HeadStats::fits(const QuerySpan& span, std::uint32_t group,
                     const ProjectionColumns& columns) const {
  const auto blocked = [&](const BlockedRatio& ratio) {
    return ratio.above.size() == span.blocks() && ratio.below.size() == span.blocks();
  };
  return heads.size() == group && error2.size() == span.samples() &&
         output2.size() == span.samples() &&
         (residual.empty() || residual.size() == std::size_t{span.samples()} * columns.residual) &&
         (changes.empty() || changes.size() == std::size_t{span.size()} * columns.draws) &&
         std::all_of(heads.begin(), heads.end(), [&](const PerQueryHead& head) {
           return blocked(head.recall) && blocked(head.nll) && blocked(head.miss) &&
                  blocked(head.error) && head.spans.size() == span.named().size() &&
                  std::all_of(head.spans.begin(), head.spans.end(), blocked);
         });
}

void HeadStats::add_recall(std::uint32_t block, std::uint32_t head, double recall) {
  heads[head].recall.add(block, recall, 1);
  heads[head].nll.add(block, -std::log(std::max(recall, kRecallFloor)), 1);
}

void HeadStats::add_outputs(const QuerySpan& span, std::uint32_t query, std::uint32_t head,
                            std::span<const float> full, std::span<const float> kept) {
  double error = 0, size = 0;
  for (std::size_t d = 0; d < full.size(); ++d) {
    const double difference = static_cast<double>(full[d]) - static_cast<double>(kept[d]);
    error += difference * difference;
    size += static_cast<double>(full[d]) * static_cast<double>(full[d]);
  }
  add_error(span.place(query), head, error, size);
}

void HeadStats::add_error(QuerySpan::Place place, std::uint32_t head, double error, double size) {
  error2[place.sample] += error;
  output2[place.sample] += size;
  if (size > 0)
    heads[head].error.add(place.block, std::sqrt(error / size), 1);
  else
    ++heads[head].zero_outputs;
}

}  // namespace kvlab
