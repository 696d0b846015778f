// Tests of the choice of a policy at a budget, and of the text that explains it.
#include "sim/run/comparison.hpp"

#include "sim/report/recommendation.hpp"
#include "tests/catch.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

Difference apart(double mean) { return {mean, 0.01, {mean - 0.001, mean + 0.001}, 3}; }
Difference unsure(double mean) { return {mean, 1, {mean - 1, mean + 1}, 3}; }

/// The recommendation at a budget of 100 bytes. `significant`: whether all differences are
/// significant.
Recommendation recommended(const std::vector<Candidate>& candidates, bool significant) {
  const ComparisonScope scope{.budget = "64",
                              .budget_bytes = 100,
                              .full_bytes = 1000,
                              .metric = "KL",
                              .texts = 1,
                              .tokens = 96};
  return recommend(candidates, scope, [&](std::size_t a, std::size_t b) {
    const double mean = candidates[a].error - candidates[b].error;
    return significant ? apart(mean) : unsure(mean);
  });
}

/// A candidate with these mean and peak bytes.
Candidate candidate(const std::string& name, double error, double mean = 98, double peak = 100) {
  return {.name = name, .error = error, .memory = {.mean = mean, .peak = peak, .budget = 100}};
}

std::string choice(const std::vector<Candidate>& candidates, bool significant = false) {
  return recommended(candidates, significant).chosen_candidate().name;
}

using Indices = std::vector<std::size_t>;

}  // namespace

TEST_CASE("a candidate over the budget is never chosen, but is on the frontier") {
  const std::vector<Candidate> candidates{candidate("a", 0.3), candidate("once", 0.1, 2000, 2600),
                                          candidate("every", 0.2, 99, 111), candidate("b", 0.4)};
  const Recommendation made = recommended(candidates, true);
  CHECK(made.order == Indices{0, 3});
  CHECK(made.over_budget == Indices{1, 2});
  CHECK(made.chosen_candidate().name == "a");
  CHECK(made.runner_up == std::size_t{3});
  CHECK(made.frontier == Indices{0, 2, 1});  // b is dominated
  CHECK_THAT(recommendation_text(made),
             ContainsSubstring("Budget 64 tokens (98.0 B): a (KL 0.300) and b (0.400) differ "
                               "significantly") &&
                 ContainsSubstring("Chosen: a, lowest mean.") &&
                 ContainsSubstring("not ranked: once (26x) and every (1.1x)") &&
                 ContainsSubstring("1 text, 96 scored tokens."));
  CHECK(choice({candidate("at the limit", 0.1, 98, 102), candidate("b", 0.2)}) == "at the limit");
  CHECK(choice({candidate("above it", 0.1, 98, 102.1), candidate("b", 0.2)}) == "b");
  const Recommendation none = recommended({candidates[1], candidates[2]}, true);
  CHECK(none.none_eligible);
  CHECK_THAT(recommendation_text(none), ContainsSubstring("no policy stays within the budget"));
}

TEST_CASE(
    "the lowest mean is chosen for any order of candidates; equal means are ordered by name") {
  const std::vector<Candidate> candidates{candidate("window", 0.3), candidate("sink", 0.2),
                                          candidate("h2o", 0.1), candidate("random", 0.05)};
  for (const bool significant : {false, true}) {
    CHECK(choice(candidates, significant) == "random");
    CHECK(choice({candidates.rbegin(), candidates.rend()}, significant) == "random");
  }
  CHECK(choice({candidate("tova", 0.1), candidate("h2o", 0.1)}) == "h2o");
  CHECK(choice({candidate("h2o", 0.1), candidate("tova", 0.1)}) == "h2o");
}

TEST_CASE("at least 2% less memory is preferred if the difference is not significant") {
  CHECK(choice({candidate("a", 0.1, 100), candidate("b", 0.2, 98.5)}) == "a");
  CHECK(choice({candidate("a", 0.1, 100), candidate("b", 0.2, 98)}) == "b");
  CHECK(choice({candidate("a", 0.1, 100), candidate("b", 0.2, 90), candidate("c", 0.3, 80)}) ==
        "c");
  CHECK(choice({candidate("a", 0.1, 100), candidate("b", 0.2, 90)}, true) == "a");
  const Recommendation made =
      recommended({candidate("a", 0.1, 100), candidate("b", 0.2, 90)}, false);
  CHECK(made.for_memory);
  CHECK(made.runner_up == std::size_t{0});
  // The candidate that was not chosen has a lower mean, and the text says so.
  CHECK(made.difference(0).mean == Approx(-0.1));
  const std::string reason =
      "a has the lowest mean (0.100), but b was chosen because it needs 10.0% less memory and the "
      "difference is not significant";
  CHECK_THAT(recommendation_text(made), ContainsSubstring(reason));
  CHECK_THAT(recommendations_text({&made, 1}), ContainsSubstring("a has the lowest mean (0.100)"));
  CHECK(recommendation_json(made)["reason"] == "less memory");
  // Without an interval it is unknown whether the difference is significant, so lower memory is no
  // reason to choose b.
  const auto unknown = [](std::size_t, std::size_t) { return Difference{.mean = 0.1}; };
  CHECK(
      recommend({candidate("a", 0.1, 100), candidate("b", 0.2, 90)}, {.budget_bytes = 100}, unknown)
          .chosen_candidate()
          .name == "a");
}

TEST_CASE("significance is symmetric") {
  const std::vector<Candidate> candidates{candidate("a", 0.1), candidate("b", 0.2),
                                          candidate("c", 0.3)};
  const Recommendation made = recommended(candidates, true), alike = recommended(candidates, false);
  CHECK(made.similar().empty());
  CHECK(alike.similar() == Indices{1, 2});
  CHECK(alike.difference(1).mean == Approx(0.1));
}

TEST_CASE("a recommendation is read back as it was written") {
  const Recommendation made = recommended(
      {candidate("a", 0.1), candidate("b", 0.2), candidate("once", 0.05, 200, 260)}, false);
  const nlohmann::json written{{"recommendations", {recommendation_json(made)}}};
  const auto read = recommendations_from(JsonFields(written, "eval.json"), "recommendations");
  REQUIRE(read.size() == 1);
  CHECK(recommendations_text(read) == recommendations_text({&made, 1}));
  CHECK(recommendation_text(read[0]) == recommendation_text(made));
  nlohmann::json broken = written;
  broken["recommendations"][0]["order"][0]["kv_bytes_mean"] = "much";
  CHECK_THROWS_WITH(recommendations_from(JsonFields(broken, "eval.json"), "recommendations"),
                    ContainsSubstring("eval.json: recommendations[0]: order[0]") &&
                        ContainsSubstring("kv_bytes_mean"));
}

TEST_CASE("the terminal table has at most 80 columns") {
  std::vector<Recommendation> all;
  for (const char* name : {"h2o", "a2sf:keep=0.995:sinks=4:recent=75%"}) {
    all.push_back(recommended({candidate(name, 0.00012345), candidate("lazy_eviction", 0.2),
                               candidate("snapkv:recent=32", 0.01, 300, 977)},
                              false));
    all.back().scope.budget = name == std::string("h2o") ? "5%" : "2048";
  }
  std::size_t lines = 0;
  std::string text = recommendations_text(all);
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::size_t columns = 0;
    for (const char c : text.substr(0, end))
      columns += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
    CHECK(columns <= 80);
    text.erase(0, end + 1);
    ++lines;
  }
  CHECK(lines >= 5);
}

TEST_CASE(
    "the decisive budget has a significantly better choice, and about a tenth of the memory") {
  const std::vector<Candidate> two{candidate("a", 0.1), candidate("b", 0.2)};
  std::vector<Recommendation> all{recommended(two, false), recommended(two, true),
                                  recommended(two, true), recommended(two, true)};
  for (Recommendation& one : all) one.scope.full_bytes = 0;  // unknown
  CHECK(decisive_budget(all) == 1);
  CHECK(decisive_budget(std::vector{all[0]}) == 0);
  const double shares[]{0.1, 0.02, 0.15, 0.5};
  for (std::size_t b = 0; b < all.size(); ++b)
    all[b].scope.full_bytes = all[b].chosen_candidate().memory.mean / shares[b];
  CHECK(decisive_budget(all) == 2);
  CHECK(decisive_budget(std::vector{all[0], all[0]}) == 0);
}

TEST_CASE("protected tokens that fill the budget are named") {
  CHECK(protected_tokens_fill("h2o", "sinks=4:recent=60", 64));
  CHECK(protected_tokens_fill("h2o", "sinks=32:recent=50%", 64));
  CHECK_FALSE(protected_tokens_fill("h2o", "sinks=4:recent=50%", 64));
  CHECK_FALSE(protected_tokens_fill("window", "sinks=0:recent=64", 64));
  CHECK(protected_tokens_fill("h2o", "sinks=4:recent=60:tiers=16@50%+16@50%", 64));
  CHECK_FALSE(protected_tokens_fill("h2o", "sinks=4:recent=60:tiers=4", 64));
  Recommendation made = recommended({candidate("h2o", 0.1)}, true);
  made.scope.tokens = 0;
  made.scope.filled = {"h2o"};
  const auto lines = recommendation_warnings(made);
  REQUIRE(lines.size() == 1);
  CHECK_THAT(lines[0], ContainsSubstring("h2o at 64 tokens: the protected tokens fill"));
}
