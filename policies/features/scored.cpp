#include "policies/features/scored.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace kvlab {
namespace {

// in the order of ScoredFeature
constexpr std::string_view kScored[] = {"lagkv", "expected_attention", "redundancy"};
constexpr double kMin = 1e-12;  // lower bound of divisors, against division by zero

/// Rotates dimensions i and i + half together, by angles with these cosines and sines.
void turn(const std::vector<double>& cosines, const std::vector<double>& sines, double* x,
          std::size_t stride) {
  const std::size_t half = cosines.size();
  for (std::size_t i = 0; i < half; ++i) {
    double &a = x[i * stride], &b = x[(i + half) * stride];
    const double first = a * cosines[i] - b * sines[i];
    b = b * cosines[i] + a * sines[i];
    a = first;
  }
}

/// Mean cosines and sines of RoPE over `count` positions from `first` on.
struct MeanTurn {
  std::vector<double> cosines, sines;

  MeanTurn(const KeyValueRows& rows, std::uint32_t first, std::uint32_t count)
      : cosines(rows.inv_freq.size()), sines(rows.inv_freq.size()) {
    for (std::size_t i = 0; i < cosines.size(); ++i) {
      for (std::uint32_t at = first; at < first + count; ++at) {
        const double angle = double{rows.inv_freq[i]} * at;
        cosines[i] += std::cos(angle), sines[i] += std::sin(angle);
      }
      cosines[i] *= double{rows.rope_factor} / count, sines[i] *= double{rows.rope_factor} / count;
    }
  }
};

void make_softmax(std::vector<double>& x) {
  const double largest = *std::ranges::max_element(x);
  double sum = 0;
  for (double& value : x) sum += value = std::exp(value - largest);
  for (double& value : x) value /= sum;
}

}  // namespace

std::optional<ScoredFeature> scored_feature(std::string_view name) {
  const auto found = std::ranges::find(kScored, name);
  if (found == std::end(kScored)) return std::nullopt;
  return static_cast<ScoredFeature>(found - std::begin(kScored));
}

std::vector<std::string> scored_features() { return {std::begin(kScored), std::end(kScored)}; }

void ScoredFeatures::add(const KeyValueRows& rows) {
  const std::uint32_t first = tokens();
  unit_sum_.resize(dim_);
  for (std::size_t i = 0; i < rows.tokens; ++i) {
    const float* const key = rows.k + i * rows.stride;
    const float* const value = rows.v + i * rows.stride;
    keys_.insert(keys_.end(), key, key + dim_);
    values_.insert(values_.end(), value, value + dim_);
    double square = 0;
    for (std::uint32_t d = 0; d < dim_; ++d) square += double{key[d]} * key[d];
    inverse_norms_.push_back(1 / std::max(std::sqrt(square), kMin));
    for (std::uint32_t d = 0; d < dim_; ++d) unit_sum_[d] += key[d] * inverse_norms_.back();
  }
  if (rows.q == nullptr) return;
  count_queries(rows, first);
  if (rows.tokens > 1 || first == 0) expect(rows);
}

/// Adds the append's queries to the sums. The first `sinks` queries are left out, because they are
/// not representative. As long as there are no other queries, the latest query is used instead.
void ScoredFeatures::count_queries(const KeyValueRows& rows, std::uint32_t first) {
  expected_.resize(rows.group);
  const std::uint32_t past = std::min(settings_.sinks, tokens() - 1);
  std::uint32_t counted = counted_;
  for (std::uint32_t g = 0; g < rows.group; ++g) {
    Expected& own = expected_[g];
    own.sum.resize(dim_), own.products.resize(std::size_t{dim_} * dim_);
    counted = counted_;
    for (std::uint32_t at = std::max(first, past); at < tokens(); ++at, ++counted) {
      if (at <= settings_.sinks) {  // so far there have only been queries that are left out
        std::ranges::fill(own.sum, 0), std::ranges::fill(own.products, 0);
        counted = 0;
      }
      const float* const q = rows.q + g * rows.q_head_stride + (at - first) * rows.q_stride;
      for (std::uint32_t a = 0; a < dim_; ++a) {
        own.sum[a] += q[a];
        for (std::uint32_t b = 0; b < dim_; ++b) own.products[a * dim_ + b] += double{q[a]} * q[b];
      }
    }
  }
  counted_ = counted;
}

void ScoredFeatures::expect(const KeyValueRows& rows) {
  const MeanTurn ahead(rows, tokens(), settings_.future);
  const std::uint32_t past = std::min(settings_.sinks, tokens() - 1);
  for (Expected& own : expected_) {
    own.mean = own.sum, own.spread = own.products;
    for (double& value : own.mean) value /= counted_;
    for (std::uint32_t a = 0; a < dim_; ++a)
      for (std::uint32_t b = 0; b < dim_; ++b)
        own.spread[a * dim_ + b] = own.spread[a * dim_ + b] / counted_ - own.mean[a] * own.mean[b];
    turn(ahead.cosines, ahead.sines, own.mean.data(), 1);
    for (std::uint32_t d = 0; d < dim_; ++d) turn(ahead.cosines, ahead.sines, &own.spread[d], dim_);
    for (std::uint32_t d = 0; d < dim_; ++d)
      turn(ahead.cosines, ahead.sines, &own.spread[std::size_t{d} * dim_], 1);
  }
  std::vector<std::vector<double>> logits(expected_.size());
  for (std::uint32_t at = past; at < tokens(); ++at) {
    const std::vector<double> key = rotate_key(rows, at);
    for (std::size_t g = 0; g < expected_.size(); ++g)
      logits[g].push_back(logit(expected_[g], key, rows.softmax_scale));
  }
  for (std::size_t g = 0; g < expected_.size(); ++g) {
    expected_[g].largest = *std::ranges::max_element(logits[g]);
    expected_[g].total = 0;
    for (const double one : logits[g]) expected_[g].total += std::exp(one - expected_[g].largest);
  }
}

std::vector<double> ScoredFeatures::rotate_key(const KeyValueRows& rows,
                                               std::uint32_t position) const {
  const float* const key = keys_.data() + std::size_t{position} * dim_;
  std::vector<double> turned(key, key + dim_);
  const MeanTurn own(rows, position, 1);
  turn(own.cosines, own.sines, turned.data(), 1);
  return turned;
}

/// The logarithm of the mean of e^(scale * q · k) over queries q that are normally distributed with
/// the expected mean and covariance (`spread`). It equals scale * mean · k + scale² / 2 * kᵀ spread
/// k.
double ScoredFeatures::logit(const Expected& expected, const std::vector<double>& key,
                             double scale) const {
  double product = 0, square = 0;
  for (std::uint32_t a = 0; a < dim_; ++a) {
    product += expected.mean[a] * key[a];
    const double* const row = expected.spread.data() + std::size_t{a} * dim_;
    double row_product = 0;
    for (std::uint32_t b = 0; b < dim_; ++b) row_product += row[b] * key[b];
    square += key[a] * row_product;
  }
  return scale * product + scale * scale / 2 * square;
}

void ScoredFeatures::write(ScoredFeature feature, const KeyValueRows& rows, float* to,
                           std::size_t stride) {
  const std::uint32_t first = tokens() - rows.tokens;
  if (feature == ScoredFeature::lagkv) write_places(rows, first, to, stride);
  if (feature == ScoredFeature::expected_attention) write_expected(rows, first, to, stride);
  if (feature == ScoredFeature::redundancy) write_redundancy(first, to, stride);
}

/// The paper's scores of one partition's tokens, from their keys or from their values: scales each
/// channel by its range in the next partition, takes the standard deviation over channels, and
/// applies softmax over the tokens.
std::vector<double> ScoredFeatures::lag_scores(const KeyValueRows& rows, bool uses_keys,
                                               std::uint32_t first) const {
  const std::uint32_t lag = settings_.lag;
  std::vector<std::vector<double>> x;
  for (std::uint32_t at = first; at < first + 2 * lag; ++at) {
    const float* const value = values_.data() + std::size_t{at} * dim_;
    x.push_back(uses_keys ? rotate_key(rows, at) : std::vector<double>(value, value + dim_));
  }
  std::vector<double> low = x[lag], high = x[lag], scores(lag);
  for (std::uint32_t i = lag + 1; i < 2 * lag; ++i)
    for (std::uint32_t d = 0; d < dim_; ++d)
      low[d] = std::min(low[d], x[i][d]), high[d] = std::max(high[d], x[i][d]);
  for (std::uint32_t i = 0; i < lag; ++i) {
    for (std::uint32_t d = 0; d < dim_; ++d)
      x[i][d] = (x[i][d] - low[d]) / std::max(high[d] - low[d], kMin);
    const double mean = std::accumulate(x[i].begin(), x[i].end(), 0.0) / dim_;
    for (const double value : x[i]) scores[i] += (value - mean) * (value - mean);
    scores[i] = std::sqrt(scores[i] / (dim_ - 1));
  }
  make_softmax(scores);
  return scores;
}

void ScoredFeatures::write_places(const KeyValueRows& rows, std::uint32_t first, float* to,
                                  std::size_t stride) {
  const std::uint32_t lag = settings_.lag, sinks = settings_.sinks;
  for (std::uint32_t i = 0; i < rows.tokens; ++i) to[i * stride] = 1;
  // Starts at the partition of the append's first token, and handles all partitions whose next
  // partition is complete.
  std::uint32_t begin = first < sinks ? sinks : first - (first - sinks) % lag;
  for (; begin + 2 * lag <= tokens(); begin += lag) {
    std::vector<double> scores = lag_scores(rows, true, begin);
    const std::vector<double> value_scores = lag_scores(rows, false, begin);
    for (std::uint32_t i = 0; i < lag; ++i) scores[i] = (scores[i] + value_scores[i]) / 2;
    std::vector<std::uint32_t> order(lag);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, {}, [&](std::uint32_t i) { return scores[i]; });
    for (std::uint32_t place = 0; place < lag; ++place)
      if (const std::uint32_t at = begin + order[place]; at >= first)
        to[(at - first) * stride] = static_cast<float>(double{1} * place / lag);
  }
}

void ScoredFeatures::write_expected(const KeyValueRows& rows, std::uint32_t first, float* to,
                                    std::size_t stride) {
  for (std::uint32_t at = first; at < tokens(); ++at) {
    const std::vector<double> key = rotate_key(rows, at);
    double all = 0, square = 0;
    for (const Expected& own : expected_)
      all += std::exp(logit(own, key, rows.softmax_scale) - own.largest) / own.total;
    for (std::uint32_t d = 0; d < dim_; ++d) {
      const double value = values_[std::size_t{at} * dim_ + d];
      square += value * value;
    }
    to[(at - first) * stride] =
        static_cast<float>(all / static_cast<double>(expected_.size()) * std::sqrt(square));
  }
}

/// For each key: the sum of its cosines with the other keys is the dot product of its unit key with
/// the sum of all unit keys, minus the dot product of its unit key with itself.
void ScoredFeatures::write_redundancy(std::uint32_t first, float* to, std::size_t stride) const {
  std::vector<double> shares(tokens());
  for (std::uint32_t at = 0; at < tokens(); ++at) {
    double product = 0, own = 0;
    for (std::uint32_t d = 0; d < dim_; ++d) {
      const double unit = keys_[std::size_t{at} * dim_ + d] * inverse_norms_[at];
      product += unit * unit_sum_[d], own += unit * unit;
    }
    shares[at] = (product - own) / tokens();
  }
  make_softmax(shares);
  for (std::uint32_t at = first; at < tokens(); ++at)
    to[(at - first) * stride] = static_cast<float>(shares[at]);
}

}  // namespace kvlab
