// What can be told apart, and who is named.
#include "sim/run/comparison.hpp"

#include <cmath>
#include <random>

#include "sim/report/verdict.hpp"
#include "tests/catch.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

using Values = std::vector<double>;

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

/// One text's scores by token.
PairedScores one_text(const std::vector<Values>& configurations) {
  PairedScores paired(configurations.size());
  const std::vector<std::span<const double>> spans(configurations.begin(), configurations.end());
  paired.add_tokens("a", spans);
  return paired;
}

/// Means of two configurations by text.
PairedScores texts(const std::vector<std::pair<double, double>>& means) {
  PairedScores paired(2);
  for (const auto& [a, b] : means)
    paired.add({.text = std::to_string(paired.texts()), .means = {a, b}});
  return paired;
}

Difference apart(double mean) { return {mean, 0.01, {mean - 0.001, mean + 0.001}, 3}; }
Difference unsure(double mean) { return {mean, 1, {mean - 1, mean + 1}, 3}; }

/// Judged at a budget of 100 bytes; `told`: whether errors that differ are told apart.
Verdict judged(const std::vector<Contender>& contenders, bool told) {
  return verdict_of(contenders, 100, [&](std::size_t a, std::size_t b) {
    const double mean = contenders[a].error - contenders[b].error;
    return told ? apart(mean) : unsure(mean);
  });
}

using Indices = std::vector<std::size_t>;

}  // namespace

TEST_CASE("A small difference shows in pairs, whatever the tokens have in common") {
  const Values noise = scores(4096, 1, 7);
  Values plain = scores(4096, 64, 1), more = plain, other = scores(4096, 64, 2);
  for (std::size_t i = 0; i < plain.size(); ++i) more[i] += 0.02 + 0.05 * noise[i];
  const PairedScores paired = one_text({plain, more, other});
  const Difference difference = paired.difference(1, 0);
  CHECK(difference.mean == Approx(0.02).margin(0.003));
  CHECK(difference.behind());
  CHECK(paired.difference(0, 1).ahead());
  CHECK(paired.difference(0, 1).interval.high == Approx(-difference.interval.low));
  CHECK_FALSE(paired.difference(2, 0).told_apart());
  const Difference itself = paired.difference(0, 0);
  CHECK(itself.mean == 0);
  CHECK(itself.standard_error == 0);
  CHECK_FALSE(itself.told_apart());
}

TEST_CASE("Intervals hold what is true about as often as they say") {
  int blocks = 0, by_text = 0;
  constexpr int kTrials = 400;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < kTrials; ++trial) {
    // The mean of the noise is 0, in runs that are as long as the blocks.
    blocks += !one_text({scores(640, 64, static_cast<unsigned>(100 + trial)), Values(640, 0.0)})
                   .difference(0, 1)
                   .told_apart();
    by_text += !texts({{normal(random), 0}, {normal(random), 0}, {normal(random), 0}})
                    .difference(0, 1)
                    .told_apart();
  }
  for (const int held : {blocks, by_text}) {
    CHECK(held >= 367);  // of 400: 95% would be 380
    CHECK(held <= 393);
  }
}

TEST_CASE("Texts count before their blocks, and one that comes twice counts once") {
  // On each text the second is surely behind; from text to text it is not.
  const PairedScores paired = texts({{1, 2}, {1, 4}, {1, 0.5}});
  CHECK(paired.difference(1, 0).mean == Approx(7 / 6.0));
  CHECK(paired.difference(1, 0).interval.high ==
        Approx(7 / 6.0 + 4.302653 * std::sqrt((1 + 9 + 0.25 - 49 / 12.0) / 2 / 3)));
  CHECK_FALSE(paired.difference(1, 0).told_apart());
  PairedScores twice = texts({{1, 2}});
  twice.add({.text = "0", .means = {1, 2}});
  CHECK(twice.texts() == 1);
  CHECK(std::isnan(twice.difference(1, 0).standard_error));
}

TEST_CASE("Fewer than eight blocks of a text say nothing of an error") {
  const auto of_tokens = [](std::size_t tokens) {
    Values low(tokens, 1.0), high(tokens, 2.0);
    high.front() = 2.5;
    return one_text({low, high}).difference(1, 0);
  };
  CHECK(of_tokens(7 * 64).mean == Approx(1 + 0.5 / (7 * 64)));
  CHECK(std::isnan(of_tokens(7 * 64).interval.low));
  CHECK_FALSE(of_tokens(7 * 64).told_apart());
  CHECK(of_tokens(7 * 64 + 1).told_apart());
  // The last block is shorter, and counts by its tokens.
  Values values(65, 1.0);
  values.back() = 66;
  CHECK(one_text({values}).mean(0) == Approx(2));
}

TEST_CASE("Shares of right answers are compared by the draws in which they differ") {
  CHECK_FALSE(share_difference(2, 0, 4).told_apart());  // 4 of 4 against 2 of 4
  CHECK_FALSE(share_difference(5, 0, 40).told_apart());
  CHECK(share_difference(6, 0, 40).told_apart());
  CHECK(share_difference(6, 0, 40).mean == Approx(0.15));
  CHECK_FALSE(share_difference(0, 0, 40).told_apart());
  CHECK(share_difference(0, 0, 40).interval.high == 0);
  // Clopper and Pearson's own table: 4 of 10, 0 of 10.
  CHECK(share_interval(4, 10).low == Approx(0.1216).margin(1e-4));
  CHECK(share_interval(4, 10).high == Approx(0.7376).margin(1e-4));
  CHECK(share_interval(0, 10).high == Approx(0.3085).margin(1e-4));
  PairedScores answers(2);
  answers.add({.text = "draws",
               .means = {1, 0.5},
               .blocks = {{1, 1, 1, 1}, {1, 0, 1, 0}},
               .answers = true});
  CHECK_FALSE(answers.difference(0, 1).told_apart());
  CHECK(answers.average(0).interval.high == 1);
  CHECK(answers.average(0).interval.low == Approx(0.3976).margin(1e-4));
}

TEST_CASE("Who holds more than the budget is never better, and stands on the frontier") {
  const std::vector<Contender> contenders{{"a", 0.3, {98, 100, 0, 100}},
                                          {"once", 0.1, {2000, 2600, 0, 100}},
                                          {"every", 0.2, {99, 111, 0, 100}},
                                          {"b", 0.4, {98, 100, 0, 100}}};
  const Verdict verdict = judged(contenders, true);
  CHECK(verdict.order == Indices{0, 3});
  CHECK(verdict.more == Indices{1, 2});
  CHECK(verdict.winner() == 0);
  CHECK(verdict.frontier == Indices{0, 2, 1});  // b is dominated
  const std::string text = verdict_text(
      verdict, contenders,
      {.budget = "64 tokens", .budget_bytes = 100, .figure = "KL", .texts = 1, .tokens = 96});
  CHECK_THAT(text, ContainsSubstring("a has the least loss in KL") &&
                       ContainsSubstring("once holds 26 × the budget") &&
                       ContainsSubstring("not a better one") && ContainsSubstring("On this text") &&
                       ContainsSubstring("96 scored tokens"));
  const std::vector<Contender> alone{contenders[1], contenders[2]};
  CHECK(judged(alone, true).over_budget);
}

TEST_CASE("Of those that are not told apart, less memory is preferred, then the grid's order") {
  const auto winner = [](const std::vector<Contender>& contenders, bool told = false) {
    return judged(contenders, told).winner();
  };
  const Memory whole{100, 100, 0, 100}, token_less{98.5, 98.5, 0, 100}, less{90, 90, 0, 100};
  CHECK(winner({{"a", 0.2, whole}, {"b", 0.1, whole}}) == 0);
  CHECK(winner({{"a", 0.2, whole}, {"b", 0.1, whole}}, true) == 1);
  CHECK(winner({{"a", 0.1, whole}, {"b", 0.2, token_less}}) == 0);  // within 2%: as good as equal
  CHECK(winner({{"a", 0.1, whole}, {"b", 0.2, less}}) == 1);
  CHECK(winner({{"a", 0.1, whole}, {"b", 0.2, less}}, true) == 0);
  CHECK(winner({{"random", 0.1, whole, true}, {"b", 0.2, whole}}) == 1);
  CHECK(winner({{"random", 0.1, whole, true}, {"b", 0.2, whole}}, true) == 0);
}

TEST_CASE("Guards that are as large as the budget are said") {
  CHECK(guards_fill("h2o", "sinks=4:recent=60", 64));
  CHECK(guards_fill("h2o", "sinks=32:recent=50%", 64));
  CHECK_FALSE(guards_fill("h2o", "sinks=4:recent=50%", 64));
  CHECK_FALSE(guards_fill("window", "sinks=0:recent=64", 64));
  CHECK(guards_fill("h2o", "sinks=4:recent=60:ladder=16@50%+16@50%", 64));
  CHECK_FALSE(guards_fill("h2o", "sinks=4:recent=60:ladder=4", 64));
  const std::vector<Contender> one{{"h2o", 0.1, {1, 1, 0, 1}}};
  const auto lines =
      verdict_warnings(judged(one, true), one, {.budget = "64 tokens", .filled = {"h2o"}});
  REQUIRE(lines.size() == 1);
  CHECK_THAT(lines[0], ContainsSubstring("h2o at 64 tokens: its guards"));
}
