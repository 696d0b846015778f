// What can be told apart, and who is named.
#include "sim/run/comparison.hpp"

#include "sim/report/verdict.hpp"
#include "tests/catch.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

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
