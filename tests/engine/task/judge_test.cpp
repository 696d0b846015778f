// Tests of which answers count as right, and of the metrics that are computed from their counts.
#include "engine/evaluation/task/answers.hpp"

#include <algorithm>
#include <cmath>

#include "engine/evaluation/task/run.hpp"
#include "tests/catch.hpp"

namespace kvlab {
namespace {

Judgement one(std::string_view said, bool ended = false) {
  const std::vector<std::string> expected{"4821"};
  return judge(said, expected, ended);
}

TEST_CASE("The first number decides, once it is complete") {
  CHECK(one(" 4821.") == Judgement::right);
  CHECK(one("is it 4821, or 17?") == Judgement::right);
  CHECK(one(" 4821") == Judgement::open);
  CHECK(one(" 4821", true) == Judgement::right);
  CHECK(one(" 48211") == Judgement::wrong);
  CHECK(one(" 482", false) == Judgement::open);
  CHECK(one(" 482", true) == Judgement::wrong);
  CHECK(one(" 482 ") == Judgement::wrong);
  CHECK(one(" 49") == Judgement::wrong);
  CHECK(one("17, or 4821.") == Judgement::wrong);
  CHECK(one("") == Judgement::open);
  CHECK(one("no number", true) == Judgement::wrong);
}

TEST_CASE("All expected numbers must come in any order before any other number") {
  const std::vector<std::string> expected{"12", "123", "7"};
  const auto judgement = [&](std::string_view said, bool ended = true) {
    return judge(said, expected, ended);
  };
  CHECK(judgement("7 and 12 and 123") == Judgement::right);
  CHECK(judgement("12, 123, 7, 99") == Judgement::right);
  CHECK(judgement("12, 12, 7") == Judgement::wrong);
  CHECK(judgement("12, 7") == Judgement::wrong);
  CHECK(judgement("12, 7", false) == Judgement::open);
  CHECK(judgement("12, 7, 12", false) == Judgement::open);  // it may continue to 123
  CHECK(judgement("12, 7, 8", false) == Judgement::wrong);
}

/// If a prefix of an answer is judged right or wrong, the whole answer is judged the same.
TEST_CASE("A judgement before the end of an answer is final") {
  const std::vector<std::string> expected{"48", "481"};
  std::string said(6, ' ');
  constexpr std::string_view kAlphabet = "481 ";
  for (int code = 0; code < 4096; ++code) {
    for (std::size_t i = 0; i < said.size(); ++i) said[i] = kAlphabet[code >> (2 * i) & 3];
    const Judgement whole = judge(said, expected, true);
    CHECK(whole != Judgement::open);
    for (std::size_t length = 0; length <= said.size(); ++length) {
      const Judgement early = judge(std::string_view(said).substr(0, length), expected, false);
      if (early != Judgement::open && early != whole)
        FAIL("'" << said << "' is judged differently after " << length << " characters");
    }
  }
}

TEST_CASE("Metrics count each depth and all depths, against the first configuration") {
  const std::vector<TaskPoint> points{{10, 0}, {10, 0}, {10, 1}, {20, 1}};
  const std::vector<QueryMode> modes{QueryMode::agnostic};
  // The first configuration answers right, wrong, right, wrong. The second answers wrong, wrong,
  // right, right.
  const std::vector<std::vector<std::vector<TaskAnswer>>> answers{
      {{{true, -1, ""}, {false, -5, ""}}},
      {{{false, -2, ""}, {false, -8, ""}}},
      {{{true, -1, ""}, {true, -1, ""}}},
      {{{false, -4, ""}, {true, -2, ""}}}};
  const auto metrics = task_metrics(answers, points, modes);
  const auto find = [&](std::size_t config, std::optional<std::uint32_t> words,
                        std::optional<double> depth, std::string_view metric) {
    const auto at = std::ranges::find_if(metrics, [&](const TaskMetric& entry) {
      return entry.config == config && entry.words == words && entry.depth == depth &&
             entry.metric == metric;
    });
    return at == metrics.end() ? nullptr : &*at;
  };
  CHECK(find(0, {}, {}, "exact_match")->value == 0.5);
  CHECK(find(1, {}, {}, "exact_match")->count == 4);
  CHECK(find(1, {}, {}, "exact_match")->interval.low == share_interval(2, 4).low);
  CHECK(find(1, {}, {}, "lost")->value == 0.5);
  CHECK(find(1, {}, {}, "lost")->count == 2);
  CHECK(find(1, {}, {}, "gained")->value == 0.5);
  CHECK(find(1, 10, 0, "lost")->value == 1);
  CHECK(find(1, 10, 1, "gained") == nullptr);  // the first configuration was never wrong there
  CHECK(find(1, 20, 1, "lost") == nullptr);
  CHECK(find(1, {}, 1, "exact_match")->value == 1);
  CHECK(find(1, 20, 0, "exact_match") == nullptr);
  CHECK(find(1, 10, {}, "log_likelihood")->value == Approx(-14.0 / 3));
  const TaskMetric& change = *find(1, {}, {}, "log_likelihood_change");
  CHECK(change.value == Approx((-4 - 6 + 0 + 2) / 4.0));
  CHECK(std::isnan(change.interval.low));  // four samples are too few for an interval
  CHECK(std::isnan(find(1, 20, 1, "log_likelihood_change")->interval.low));
}

TEST_CASE("log p decides if the full cache answers no question right") {
  TaskRun run{.task = "passkey", .modes = {QueryMode::agnostic}, .prompts = {{}, {}, {}}};
  run.configs.emplace_back();  // the full cache
  for (const char* policy : {"h2o", "sink"})
    run.configs.push_back({.policy = parse_policy(policy), .budget = parse_budget("32")});
  run.answers = {{{{false, -1, ""}, {false, -8, ""}, {false, -5, ""}}},
                 {{{false, -2, ""}, {false, -9, ""}, {false, -4, ""}}},
                 {{{false, -1, ""}, {false, -4, ""}, {false, -6, ""}}}};
  const auto by_log_p = task_recommendations(run, 0);
  REQUIRE(by_log_p.size() == 1);
  CHECK(by_log_p[0].scope.metric == "log p of the right answer");
  CHECK(by_log_p[0].chosen_candidate().name == "sink");
  CHECK(by_log_p[0].chosen_candidate().error == Approx(5));
  run.answers[1][0][0].right = true;
  run.answers[1][0][1].right = true;  // h2o
  const auto by_share = task_recommendations(run, 0);
  CHECK(by_share[0].scope.metric == "right answers");
  CHECK(by_share[0].chosen_candidate().name == "h2o");
}

}  // namespace
}  // namespace kvlab
