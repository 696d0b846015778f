// Who is deployed, with which evidence.
#include "engine/loop/deploy/deploy.hpp"

#include "engine/loop/deploy/candidates.hpp"
#include "engine/loop/deploy/confirm.hpp"

#include "tests/catch.hpp"
#include "tests/sim/run_fixture.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

PolicyFile deployed(const Run& run, const std::string& budget = "64",
                    const std::string& metric = "nll_recall") {
  const Figures figures(run.rows);
  return policy_file_of(run, figures, rank_for_deployment(run, figures, budget, metric));
}

}  // namespace

TEST_CASE("the best policy at the budget is deployed, with its settings and evidence") {
  Run run = made_up_run({{"window", "sinks=0:recent=0", 0.8, 0.01},
                         {"h2o", "sinks=2:recent=25%", 0.3, 0.01},
                         {"lru", "sinks=0:recent=0", 0.31, 0.01},
                         {"oracle_mass", "", 0.1, 0.01},
                         {"full", "", 0, 0}});
  run.hash = "00112233445566aa";
  for (ResultRow& row : run.rows)
    if (row.policy == "h2o") row.positions = "cache", row.seed = 5;
  const PolicyFile file = deployed(run);
  CHECK(file.cache.policy.text() == "h2o:sinks=2:recent=25%");
  CHECK(file.cache.budget.text() == "64");
  CHECK(file.cache.positions == Positions::cache);
  CHECK(file.cache.prefill.text() == "dense");
  CHECK(file.cache.seed == 5);
  CHECK(file.model == "tiny");
  CHECK(file.weights_xxh3 == "fedcba9876543210");
  CHECK(file.run["hash"] == "00112233445566aa");
  CHECK(file.run["ties"] == nlohmann::json::array({"lru"}));
  REQUIRE(file.run["ranking"].size() == 3);
  CHECK(file.run["ranking"][2]["policy"] == "window");
  CHECK(file.run["ranking"][2]["ties_with_first"] == false);
  CHECK(file.run["references"]["oracle_mass"] == Approx(0.1));
  CHECK(file.run["references"]["full"] == 0.0);
}

TEST_CASE("the higher recall wins, and the lower error") {
  // recall and -ln recall of the fixture agree, so swap the figures to tell the two apart.
  Run run = made_up_run(
      {{"window", "sinks=0:recent=0", 0.8, 0.01}, {"lru", "sinks=0:recent=0", 0.3, 0.01}});
  CHECK(deployed(run, "64", "recall").cache.policy.name == "lru");
  CHECK(deployed(run, "64", "output_error").cache.policy.name == "lru");
  for (ResultRow& row : run.rows)
    if (row.metric == "recall") row.value = row.policy == "window" ? 0.9 : 0.2;
  CHECK(deployed(run, "64", "recall").cache.policy.name == "window");
  CHECK(deployed(run, "64", "nll_recall").cache.policy.name == "lru");
}

TEST_CASE("random is deployed only where nothing ties with it") {
  CHECK(deployed(made_up_run({{"random", "sinks=0:recent=0", 0.3, 0.01},
                              {"window", "sinks=0:recent=0", 0.31, 0.01}}))
            .cache.policy.name == "window");
  CHECK(deployed(made_up_run({{"random", "sinks=0:recent=0", 0.3, 0.01},
                              {"window", "sinks=0:recent=0", 0.9, 0.01}}))
            .cache.policy.name == "random");
}

TEST_CASE("of those that tie, the one that keeps the fewest bytes is deployed") {
  const std::string_view policies[] = {"h2o", "lru", "window"};
  Run run = made_up_run({{"h2o", "sinks=0:recent=50%:once", 0.3, 0.01},
                         {"lru", "sinks=0:recent=0", 0.31, 0.01},
                         {"window", "sinks=0:recent=0", 0.8, 0.01}});
  const double bytes[] = {3e6, 1e6, 1e6};
  for (std::size_t p = 0; p < 3; ++p)
    run.rows.push_back(made_up_row({std::string(policies[p]), run.rows[p * 24].params, 0, 0},
                                   "trace0", "64", "kv_bytes", bytes[p]));
  const PolicyFile tied = deployed(run);
  CHECK(tied.cache.policy.name == "lru");
  CHECK(tied.run["ranking"][0]["bytes_of_least"] == 3.0);
  CHECK_FALSE(tied.run["ranking"][1].contains("bytes_of_least"));
  for (ResultRow& row : run.rows)
    if (row.policy == "lru" && row.metric == "nll_recall") row.value = 0.5;
  CHECK(deployed(run).cache.policy.text() == "h2o:sinks=0:recent=50%:once");  // ahead, so it wins
  CHECK(kept_more(3e6, 1e6) == "keeps 3 × the bytes");
  CHECK(kept_more(1e6, 1e6).empty());
}

TEST_CASE("confirmation orders by KL, and says what cannot be told apart") {
  const Run run = made_up_run({{"window", "sinks=0:recent=0", 0.2, 0.01},
                               {"lru", "sinks=0:recent=0", 0.3, 0.01},
                               {"h2o", "sinks=0:recent=50%", 0.4, 0.01}});
  const Figures figures(run.rows);
  Ballot ballot = rank_for_deployment(run, figures, "64", "nll_recall");
  REQUIRE(ballot.winner == 0);
  // h2o has the least KL and the greatest perplexity; lru is behind it within the interval, window
  // behind it outside.
  Evaluation evaluation;
  const char* names[] = {"full", "window", "lru", "h2o"};
  const double kl[] = {0, 0.5, 0.11, 0.1}, perplexity[] = {8, 8.1, 8.2, 8.3};
  for (std::size_t c = 0; c < 4; ++c) {
    EvalScore score{.config = {.policy = parse_policy(names[c])}, .budget_tokens = 64};
    if (c > 0) score.config.budget = parse_budget("64");
    score.kl = kl[c], score.perplexity = perplexity[c], score.kl_error = 0.01, score.tokens = 2000;
    evaluation.scores.push_back(score);
  }
  const auto pair = [&](std::size_t a, std::size_t b, double mean, double low, double high) {
    evaluation.pairs.push_back({a, b, {mean, {low, high}}, {}});
  };
  pair(2, 1, -0.39, -0.4, -0.3), pair(3, 1, -0.4, -0.45, -0.35), pair(3, 2, -0.01, -0.03, 0.01);
  auto confirmed = confirm(evaluation, figures, ballot);
  REQUIRE(confirmed.size() == 3);
  CHECK(ballot.winner == 2);
  CHECK(confirmed[0].standing == 2);
  CHECK(confirmed[1].standing == 1);
  CHECK(confirmed[1].ties());
  CHECK(confirmed[1].behind.mean == Approx(0.01));
  CHECK_FALSE(confirmed[2].ties());
  const auto json = confirmed_json(confirmed, figures, ballot);
  CHECK(json[1]["policy"] == "lru");
  CHECK(json[1]["ties_with_first"] == true);
  CHECK(json[2]["behind"]["told_apart"] == true);

  ballot.kv_bytes = {1e6, 1e6, 2e6};  // what cannot be told apart is decided by what it keeps
  confirm(evaluation, figures, ballot);
  CHECK(ballot.winner == 1);
}

TEST_CASE("what cannot be deployed is refused by name") {
  const MadeUp window{"window", "sinks=0:recent=0", 0.8, 0.01};
  Run run = made_up_run({window}, 2);
  CHECK_THROWS_WITH(deployed(run, "96"), ContainsSubstring("96") && ContainsSubstring("64, 128"));
  CHECK_THROWS_WITH(deployed(run, "64", "speed"), ContainsSubstring("--metric: 'speed'"));
  CHECK_THROWS_WITH(deployed(run, "64", "kv_bytes"), ContainsSubstring("--metric"));
  CHECK_THROWS_WITH(deployed(made_up_run({{"full", "", 0, 0}, {"oracle_mass", "", 0.1, 0}})),
                    ContainsSubstring("not deployed"));
  CHECK_THROWS_WITH(deployed(made_up_run({{"mine", "", 0.1, 0}})),
                    ContainsSubstring("unknown policy 'mine'"));
  for (ResultRow& row : run.rows)
    if (row.trace == "trace1" && row.budget == "64") row.budget_tokens = 70;
  CHECK_THROWS_WITH(deployed(run, "64"), ContainsSubstring("64 to 70 tokens"));
  run = made_up_run({window}, 2);
  run.info.traces[1].weights_xxh3 = "1111111111111111";
  CHECK_THROWS_WITH(deployed(run), ContainsSubstring("different weights"));
}
