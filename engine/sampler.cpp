#include "engine/sampler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "traces/base/numeric/softmax.hpp"
#include "traces/base/split_mix.hpp"

namespace kvlab {
namespace {

/// The counter-th random number of `seed`, uniform in [0, 1).
double random_number(std::uint64_t seed, std::uint64_t counter) {
  return static_cast<double>(split_mix(seed + counter * kSplitMixStep) >> 11) * 0x1p-53;
}

std::int32_t most_likely(std::span<const float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (!std::isfinite(*best))
    throw std::runtime_error("logits are not finite; the checkpoint's weights may be damaged");
  return static_cast<std::int32_t>(best - logits.begin());
}

/// The ids to sample from: the `top_k` most probable ones, or all. They are in descending order of
/// probability if top-k or top-p leaves out ids; otherwise in ascending order of id.
std::vector<std::int32_t> candidates(std::span<const float> logits,
                                     const SamplingOptions& options) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const bool cut = options.top_k > 0 && options.top_k < ids.size();
  if (!cut && options.top_p >= 1) return ids;
  const auto end = cut ? ids.begin() + options.top_k : ids.end();
  std::partial_sort(ids.begin(), end, ids.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  ids.erase(end, ids.end());
  return ids;
}

/// Ids and their weights, which are proportional to their probabilities.
struct Weighted {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  double total = 0;
};

/// Weighs the ids to sample from at a temperature above 0. `largest`: the largest logit.
Weighted weigh(std::span<const float> logits, double largest, const SamplingOptions& options) {
  Weighted all{.ids = candidates(logits, options)};
  for (const std::int32_t id : all.ids)
    all.weights.push_back(
        std::exp((static_cast<double>(logits[static_cast<std::size_t>(id)]) - largest) /
                 options.temperature));
  all.total = std::accumulate(all.weights.begin(), all.weights.end(), 0.0);
  if (options.top_p == 1) return all;
  // Top-p: the smallest set of the most probable tokens whose probabilities sum to at least top_p.
  double sum = 0;
  std::size_t kept = 0;
  while (kept < all.weights.size() && sum < options.top_p * all.total) sum += all.weights[kept++];
  all.weights.resize(kept);
  all.ids.resize(kept);
  all.total = sum;
  return all;
}

}  // namespace

Sampler::Sampler(SamplingOptions options) : options_(options) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    throw std::invalid_argument(
        fmt::format("temperature: {} should be 0 (greedy) or above", options.temperature));
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw std::invalid_argument(
        fmt::format("top-p: {} should be above 0 and at most 1", options.top_p));
}

std::int32_t Sampler::pick(std::span<const float> logits) {
  const std::uint64_t index = counter_++;
  const std::int32_t best = most_likely(logits);
  if (options_.temperature == 0) return best;
  const double largest = static_cast<double>(logits[static_cast<std::size_t>(best)]);
  const Weighted all = weigh(logits, largest, options_);
  const double target = random_number(options_.seed, index) * all.total;
  double sum = 0;
  for (std::size_t i = 0; i < all.ids.size(); ++i) {
    sum += all.weights[i];
    if (target < sum) return all.ids[i];
  }
  return best;  // only reached if rounding makes the target as large as the sum of all weights
}

std::vector<double> Sampler::probabilities(std::span<const float> logits) const {
  const auto best = static_cast<std::size_t>(most_likely(logits));
  std::vector<double> p(logits.size());
  p[best] = 1;
  if (options_.temperature == 0) return p;
  p[best] = 0;
  const Weighted all = weigh(logits, static_cast<double>(logits[best]), options_);
  for (std::size_t i = 0; i < all.ids.size(); ++i)
    p[static_cast<std::size_t>(all.ids[i])] = all.weights[i] / all.total;
  return p;
}

double Sampler::uniform() { return random_number(options_.seed, counter_++); }

RowScore score_row(std::span<const float> baseline, std::span<const float> logits,
                   std::int32_t next) {
  const auto first_of = [](std::span<const float> row) {
    return std::max_element(row.begin(), row.end()) - row.begin();
  };
  std::vector<float> e(logits.size());
  const std::int32_t shift = shared_exponentials(logits.data(), logits.size(), e.data());
  const double lse = log_sum_exp(shift, lane_sum(e.data(), e.size()));
  const std::int32_t baseline_shift =
      shared_exponentials(baseline.data(), baseline.size(), e.data());
  const float baseline_sum = lane_sum(e.data(), e.size());
  double difference = 0;
  for (std::size_t i = 0; i < e.size(); ++i)
    difference += static_cast<double>(e[i]) * static_cast<double>(baseline[i] - logits[i]);
  return {.nll = lse - static_cast<double>(logits[static_cast<std::size_t>(next)]),
          .kl = difference / static_cast<double>(baseline_sum) + lse -
                log_sum_exp(baseline_shift, baseline_sum),
          .same_first = first_of(baseline) == first_of(logits),
          .first = static_cast<std::int32_t>(first_of(logits))};
}

}  // namespace kvlab
