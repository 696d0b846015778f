// Tests of PairedScores: means over texts, paired differences and their 95% intervals.
#include "sim/run/paired_scores.hpp"

#include <cmath>
#include <numeric>
#include <random>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

using Values = std::vector<double>;

/// Scores of `tokens` tokens with autocorrelated noise, which changes every `run` tokens.
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

/// The scores of one text, [configuration][token].
PairedScores one_text(const std::vector<Values>& configurations) {
  PairedScores paired(configurations.size());
  const std::vector<std::span<const double>> spans(configurations.begin(), configurations.end());
  paired.add_tokens("a", spans);
  return paired;
}

/// Texts with the given means of two configurations.
PairedScores texts(const std::vector<std::pair<double, double>>& means) {
  PairedScores paired(2);
  for (const auto& [a, b] : means)
    paired.add({.text = std::to_string(paired.texts()), .means = {a, b}});
  return paired;
}

/// Generates random texts. The means of texts have variance `between`. The values of a text's
/// blocks have that text's mean and variance 1.
class Texts {
 public:
  Texts(double between, bool skewed, unsigned seed)
      : between_(std::sqrt(between)), skewed_(skewed), random_(seed) {}

  std::vector<PairedText> sample(const std::vector<std::size_t>& blocks) {
    std::vector<PairedText> texts;
    for (const std::size_t count : blocks) {
      const double mean = between_ * value();
      PairedText text{.text = std::to_string(texts.size()),
                      .tokens = static_cast<double>(count),
                      .blocks = {{}}};
      for (std::size_t b = 0; b < count; ++b) text.blocks[0].push_back(mean + value());
      text.means = {std::accumulate(text.blocks[0].begin(), text.blocks[0].end(), 0.0) /
                    static_cast<double>(count)};
      texts.push_back(std::move(text));
    }
    return texts;
  }

 private:
  /// Mean 0 and variance 1. Skewed: a gamma distribution of shape 4, with skewness 1.
  double value() { return skewed_ ? (gamma_(random_) - 4) / 2 : normal_(random_); }

  double between_;
  bool skewed_;
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  std::gamma_distribution<double> gamma_{4, 1};
};

Difference average(const std::vector<PairedText>& texts) {
  PairedScores paired(1);
  for (const PairedText& text : texts) paired.add(text);
  return paired.average(0);
}

double half(const Difference& difference) {
  return (difference.interval.high - difference.interval.low) / 2;
}

}  // namespace

TEST_CASE("A small difference is significant in pairs, even if tokens share large noise") {
  const Values noise = scores(4096, 1, 7);
  Values plain = scores(4096, 64, 1), more = plain, other = scores(4096, 64, 2);
  for (std::size_t i = 0; i < plain.size(); ++i) more[i] += 0.02 + 0.05 * noise[i];
  const PairedScores paired = one_text({plain, more, other});
  const Difference difference = paired.difference(1, 0);
  CHECK(difference.mean == Approx(0.02).margin(0.003));
  CHECK(difference.is_worse());
  CHECK(paired.difference(0, 1).ahead());
  CHECK(paired.difference(0, 1).interval.high == Approx(-difference.interval.low));
  CHECK_FALSE(paired.difference(2, 0).significantly_different());
  const Difference itself = paired.difference(0, 0);
  CHECK(itself.mean == 0);
  CHECK(itself.standard_error == 0);
  CHECK_FALSE(itself.significantly_different());
}

TEST_CASE("Intervals are over texts before blocks, and a repeated text counts once") {
  // The differences within each text are clear, but they vary so much between texts that the
  // difference over texts is not significant.
  const PairedScores paired = texts({{1, 2}, {1, 4}, {1, 0.5}});
  CHECK(paired.difference(1, 0).mean == Approx(7 / 6.0));
  CHECK(paired.difference(1, 0).interval.high ==
        Approx(7 / 6.0 + 4.302653 * std::sqrt((1 + 9 + 0.25 - 49 / 12.0) / 2 / 3)));
  CHECK_FALSE(paired.difference(1, 0).significantly_different());
  PairedScores twice = texts({{1, 2}});
  twice.add({.text = "0", .means = {1, 2}});
  CHECK(twice.texts() == 1);
  CHECK(std::isnan(twice.difference(1, 0).standard_error));
}

TEST_CASE("Fewer than eight blocks of a text give no interval") {
  const auto compare_tokens = [](std::size_t tokens) {
    Values low(tokens, 1.0), high(tokens, 2.0);
    high.front() = 2.5;
    return one_text({low, high}).difference(1, 0);
  };
  CHECK(compare_tokens(7 * 64).mean == Approx(1 + 0.5 / (7 * 64)));
  CHECK(std::isnan(compare_tokens(7 * 64).interval.low));
  CHECK_FALSE(compare_tokens(7 * 64).significantly_different());
  CHECK(compare_tokens(7 * 64 + 1).significantly_different());
  // The last block is shorter, and is weighted by its tokens.
  Values values(65, 1.0);
  values.back() = 66;
  CHECK(one_text({values}).mean(0) == Approx(2));
}

TEST_CASE("Shares of right answers are compared by the samples that differ") {
  CHECK_FALSE(share_difference(2, 0, 4).significantly_different());  // 4 of 4 against 2 of 4
  CHECK_FALSE(share_difference(5, 0, 40).significantly_different());
  CHECK(share_difference(6, 0, 40).significantly_different());
  CHECK(share_difference(6, 0, 40).mean == Approx(0.15));
  CHECK_FALSE(share_difference(0, 0, 40).significantly_different());
  CHECK(share_difference(0, 0, 40).interval.high == 0);
  // From Clopper and Pearson's table: 4 of 10, 0 of 10.
  CHECK(share_interval(4, 10).low == Approx(0.1216).margin(1e-4));
  CHECK(share_interval(4, 10).high == Approx(0.7376).margin(1e-4));
  CHECK(share_interval(0, 10).high == Approx(0.3085).margin(1e-4));
  PairedScores answers(2);
  answers.add({.text = "draws",
               .means = {1, 0.5},
               .blocks = {{1, 1, 1, 1}, {1, 0, 1, 0}},
               .is_binary = true});
  CHECK_FALSE(answers.difference(0, 1).significantly_different());
  CHECK(answers.average(0).interval.high == 1);
  CHECK(answers.average(0).interval.low == Approx(0.3976).margin(1e-4));
}

TEST_CASE("Intervals of one text cover its mean in 95% of cases") {
  int covered = 0;
  for (unsigned trial = 0; trial < 400; ++trial)  // the noise is new in every block
    covered += !one_text({scores(640, 64, 100 + trial), Values(640, 0.0)})
                    .difference(0, 1)
                    .significantly_different();
  CHECK(covered >= 367);  // 380 expected
  CHECK(covered <= 393);
}

TEST_CASE("Intervals over texts cover 90 to 97% for any mixture of lengths") {
  // Lengths in blocks. The shortest text has 4 blocks, 256 tokens.
  const std::vector<std::vector<std::size_t>> mixtures{
      {4, 4},         {16, 4, 4},         {40, 4},         {32, 4, 4, 4},
      {40, 4, 4},     {160, 4, 4, 4},     {8, 8, 8, 8, 8}, {8, 8, 8, 8, 8, 8, 8, 8},
      {20, 4, 8, 12}, {80, 4, 4, 4, 4, 4}};
  constexpr int kTrials = 2000;
  for (const bool skewed : {false, true})
    for (const double between :
         {0.05, 0.25})  // variance between texts, divided by that within a block
      for (const auto& blocks : mixtures) {
        Texts texts(between, skewed, 1);
        int covered = 0;
        for (int trial = 0; trial < kTrials; ++trial)
          covered += !average(texts.sample(blocks)).significantly_different();
        CAPTURE(blocks, between, skewed);
        CHECK(covered >= 0.9 * kTrials);
        CHECK(covered <= 0.975 * kTrials);
      }
}

TEST_CASE("A short text beside a long one never makes the interval narrower") {
  Texts texts(0.01, false, 3);
  std::mt19937 random(4);
  int narrower_by_texts = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const std::size_t longest = 17 + random() % 200, shorts = 1 + random() % 6;
    std::vector<std::size_t> blocks{longest};
    for (std::size_t i = 0; i < shorts; ++i) blocks.push_back(1 + random() % ((longest - 1) / 16));
    const std::vector<PairedText> all = texts.sample(blocks);
    const double alone = half(average({all.front()})), together = half(average(all));
    CHECK(together >= alone * (1 - 1e-12));
    narrower_by_texts += together < alone * (1 + 1e-12);
  }
  CHECK(narrower_by_texts > 20);  // in these trials, intervals over texts alone are narrower
}

TEST_CASE("Every text has weight 1, however long it is") {
  PairedScores paired(2);
  const Values low(640, 1.0), high(640, 2.0), other_low(64, 1.0), other_high(64, 4.0);
  paired.add_tokens("long", std::vector<std::span<const double>>{low, high});
  paired.add_tokens("shorter", std::vector<std::span<const double>>{other_low, other_high});
  CHECK(paired.mean(1) == Approx(3));
  CHECK(paired.tokens() == 704);
  const Difference difference = paired.difference(1, 0);
  CHECK(difference.mean == Approx(2));
  CHECK(difference.standard_error == Approx(1));
  CHECK(half(difference) == Approx(12.7062));
}

TEST_CASE("Blocks continue from one sequence of a text to the next") {
  PairedScores paired(1);
  // The blocks have 64, 64, … tokens, and not 64, 1, 64, 1, …
  const Values sequence = scores(65, 1, 3);
  PairedScores whole(1);
  Values all;
  for (int i = 0; i < 9; ++i) {
    paired.add_tokens("a", std::vector<std::span<const double>>{sequence});
    all.insert(all.end(), sequence.begin(), sequence.end());
  }
  whole.add_tokens("a", std::vector<std::span<const double>>{all});
  CHECK(half(paired.average(0)) == Approx(half(whole.average(0))));
}
