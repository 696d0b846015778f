// Ranks, quantiles, and the bootstrap.
#include "engine/loop/statistics.hpp"

#include <cmath>
#include <numeric>
#include <random>

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

TEST_CASE("A quantile lies between its neighbours in proportion") {
  const Values values{5, 1, 3, 2, 4};
  CHECK(quantile(values, 0) == 1);
  CHECK(quantile(values, 0.5) == 3);
  CHECK(quantile(values, 0.9) == Approx(4.6));
  CHECK(quantile(values, 1) == 5);
  CHECK(quantile({7}, 0.99) == 7);
  CHECK(std::isnan(quantile({}, 0.5)));
}

TEST_CASE("The spread of one text is not known") {
  CHECK(spread_of(Values{1, 3}).mean == 2);
  CHECK(spread_of(Values{1, 3}).deviation == Approx(std::sqrt(2.0)));
  CHECK(std::isnan(spread_of(Values{1}).deviation));
}

/// Scores of `tokens` tokens whose neighbours are alike: noise that changes every `run` tokens.
Values scores(std::size_t tokens, std::size_t run, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Values values;
  double level = 0;
  for (std::size_t i = 0; i < tokens; ++i) {
    if (i % run == 0) level = normal(random);
    values.push_back(level);
  }
  return values;
}

ScoreBlocks blocks_of(const std::vector<Values>& configurations, std::size_t tokens) {
  ScoreBlocks blocks(configurations.size());
  std::vector<std::span<const double>> spans(configurations.begin(), configurations.end());
  blocks.add(spans, tokens);
  return blocks;
}

TEST_CASE("A small difference shows in pairs, whatever the tokens have in common") {
  const Values noise = scores(4096, 1, 7);
  Values plain = scores(4096, 64, 1), more = plain, other = scores(4096, 64, 2);
  for (std::size_t i = 0; i < plain.size(); ++i) more[i] += 0.02 + 0.05 * noise[i];
  const PairedBootstrap paired(blocks_of({plain, more, other}, 64));
  const Difference difference = paired.difference(1, 0);
  CHECK(difference.mean == Approx(0.02).margin(0.003));
  CHECK(difference.told_apart());
  CHECK_FALSE(difference.ahead());
  CHECK(paired.difference(0, 1).ahead());
  CHECK(paired.difference(0, 1).interval.high == Approx(-difference.interval.low));
  CHECK_FALSE(paired.difference(2, 0).told_apart());
  CHECK(paired.difference(0, 0).mean == 0);
  CHECK_FALSE(paired.difference(0, 0).told_apart());
}

TEST_CASE("Intervals hold what is true about as often as they say") {
  int held = 0;
  constexpr int kTrials = 200;
  for (int trial = 0; trial < kTrials; ++trial) {
    // The mean of the noise is 0, in runs that are as long as the blocks.
    const Values noise = scores(2048, 64, static_cast<unsigned>(100 + trial)), none(2048, 0.0);
    const PairedBootstrap paired(blocks_of({noise, none}, 64));
    held += !paired.difference(0, 1).told_apart();
  }
  CHECK(held >= 176);  // of 200: 95% would be 190
  CHECK(held <= 199);
}

TEST_CASE("Blocks are shortened where there are few tokens, and too few say nothing") {
  CHECK(ScoreBlocks::block_tokens(10'000) == 64);
  CHECK(ScoreBlocks::block_tokens(320) == 20);
  CHECK(ScoreBlocks::block_tokens(3) == 1);
  const Values low(7, 1.0), high(7, 2.0);
  const PairedBootstrap paired(blocks_of({low, high}, 1));
  CHECK(paired.difference(1, 0).mean == 1);
  CHECK(std::isnan(paired.difference(1, 0).interval.low));
  CHECK_FALSE(paired.difference(1, 0).told_apart());
  // The last block is shorter, and counts by its tokens.
  CHECK(PairedBootstrap(blocks_of({{1, 1, 1, 5}}, 3)).mean(0) == 2);
}

TEST_CASE("Items drawn anew give the percentiles of a statistic") {
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
