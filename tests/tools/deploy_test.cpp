// Tests of the choice of a policy to deploy, and of its evidence.
#include "engine/evaluation/deploy/deploy.hpp"

#include "tests/catch.hpp"
#include "tests/sim/run_fixture.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

PolicyFile deployed(const Run& run, const std::string& budget = "64",
                    const std::string& metric = "nll_recall") {
  const MetricTable metric_table(run.rows);
  return policy_file_of(run, metric_table, rank_for_deployment(run, metric_table, budget, metric));
}

}  // namespace

TEST_CASE("the best policy at the budget is deployed, with its settings and evidence") {
  Run run = made_up_run({{"window", "sinks=0:recent=0", 0.8, 0.01},
                         {"h2o", "sinks=2:recent=25%", 0.3, 0.01},
                         {"lru", "sinks=0:recent=0", 0.31, 0.01},
                         {"oracle_attention", "", 0.1, 0.01},
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
  CHECK(file.run["layers"] == "all");
  run.info.traces.front().numbers = {5, 11};
  CHECK(deployed(run).run["layers"] == nlohmann::json::array({5, 11}));
  CHECK(file.run["not_significantly_different"] == nlohmann::json::array({"lru"}));
  CHECK(file.run["recommendation"]["choice"] == "h2o");
  CHECK(file.run["recommendation"]["not_significantly_different"] ==
        nlohmann::json::array({"lru"}));
  REQUIRE(file.run["ranking"].size() == 3);
  CHECK(file.run["ranking"][2]["policy"] == "window");
  CHECK(file.run["ranking"][2]["not_significantly_different"] == false);
  CHECK(file.run["references"]["oracle_attention"] == Approx(0.1));
  CHECK(file.run["references"]["full"] == 0.0);
}

TEST_CASE("the higher recall or the lower error is deployed") {
  // In the fixture, recall and nll_recall prefer the same policy. The test changes the values of
  // recall, so that the two metrics prefer different policies.
  Run run = made_up_run(
      {{"window", "sinks=0:recent=0", 0.8, 0.01}, {"lru", "sinks=0:recent=0", 0.3, 0.01}});
  CHECK(deployed(run, "64", "recall").cache.policy.name == "lru");
  CHECK(deployed(run, "64", "output_error").cache.policy.name == "lru");
  for (ResultRow& row : run.rows)
    if (row.metric == "recall") row.value = row.policy == "window" ? 0.9 : 0.2;
  CHECK(deployed(run, "64", "recall").cache.policy.name == "window");
  CHECK(deployed(run, "64", "nll_recall").cache.policy.name == "lru");
}

TEST_CASE("the lowest mean is deployed for every command-line order") {
  const MadeUp low{"random", "sinks=0:recent=0", 0.3, 0.01},
      high{"window", "sinks=0:recent=0", 0.31, 0.01};
  CHECK(deployed(made_up_run({low, high})).cache.policy.name == "random");
  CHECK(deployed(made_up_run({high, low})).cache.policy.name == "random");
}

TEST_CASE("a policy with 2% less memory is deployed if the difference is not significant") {
  const std::string_view policies[] = {"h2o", "lru", "window"};
  Run run = made_up_run({{"h2o", "sinks=0:recent=50%", 0.29, 0.01},
                         {"lru", "sinks=0:recent=0", 0.3, 0.01},
                         {"window", "sinks=0:recent=0", 0.8, 0.01}});
  const auto hold = [&](double h2o, double lru) {
    Run held = run;
    const double bytes[] = {h2o, lru, 1e6};
    for (std::size_t p = 0; p < 3; ++p)
      for (const char* metric : {"kv_bytes_mean", "kv_bytes_peak", "budget_bytes"}) {
        ResultRow row =
            made_up_row({std::string(policies[p]), run.rows[p * 24].params, 0, NAN}, "trace0", "64",
                        metric, metric == std::string("budget_bytes") ? 1e6 : bytes[p]);
        row.text = run.rows.front().text;
        held.rows.push_back(row);
      }
    return held;
  };
  // A difference of less than 2% of the memory does not matter.
  CHECK(deployed(hold(1e6, 0.99e6)).cache.policy.name == "h2o");
  CHECK(deployed(hold(1e6, 0.97e6)).cache.policy.name == "lru");
  const PolicyFile more = deployed(hold(3e6, 1e6));  // h2o is over the budget
  CHECK(more.cache.policy.name == "lru");
  CHECK(more.run["recommendation"]["over_budget"][0]["policy"] == "h2o");
  CHECK(more.run["ranking"][2]["over_budget"] == true);
  CHECK(more.run["ranking"][2]["kv_bytes_peak"] == 3e6);
  for (ResultRow& row : run.rows)
    if (row.policy == "lru" && row.metric == "nll_recall")
      row.value = 0.5, row.blocks = made_up_blocks(0.5, 0.01, 2);
  CHECK(deployed(hold(1e6, 0.5e6)).cache.policy.name == "h2o");  // the difference is significant
}

TEST_CASE("a paired difference over the same queries is significant despite their scatter") {
  // The standard error of each policy is as large as the difference of the two policies. But the
  // difference is about the same in every block, so it is significant.
  Run run =
      made_up_run({{"h2o", "sinks=0:recent=50%", 0.3, 0.1}, {"lru", "sinks=0:recent=0", 0.4, 0.1}});
  for (ResultRow& row : run.rows)
    if (!row.blocks.empty()) row.blocks = made_up_blocks(row.value, 0.1, 3);
  for (ResultRow& row : run.rows)
    if (row.policy == "lru" && !row.blocks.empty()) row.blocks[0] += 1e-3;
  CHECK(deployed(run).run["not_significantly_different"].empty());
  for (ResultRow& row : run.rows) row.blocks.clear();  // as in a run of an older version
  CHECK(deployed(run).run["not_significantly_different"].size() == 1);
}

TEST_CASE("confirmation orders by KL, and marks policies that do not differ significantly") {
  const Run run = made_up_run({{"window", "sinks=0:recent=0", 0.2, 0.01},
                               {"lru", "sinks=0:recent=0", 0.3, 0.01},
                               {"h2o", "sinks=0:recent=50%", 0.4, 0.01}});
  const MetricTable metric_table(run.rows);
  Ballot ballot = rank_for_deployment(run, metric_table, "64", "nll_recall");
  REQUIRE(ballot.winner == 0);
  // h2o has the lowest KL and the highest perplexity. Its difference to lru is not significant, and
  // its difference to window is.
  const char* names[] = {"full", "window", "lru", "h2o"};
  const double perplexity[] = {8, 8.1, 8.2, 8.3};
  const auto evaluation_of = [&](const Memory& h2o_memory) {
    Evaluation evaluation{.scores = {}, .kl = PairedScores(4)};
    for (const auto& [window, lru, h2o] :
         {std::tuple(0.5, 0.11, 0.1), std::tuple(0.6, 0.1, 0.11), std::tuple(0.4, 0.12, 0.09)})
      evaluation.kl.add(
          {.text = std::to_string(evaluation.kl.texts()), .means = {0, window, lru, h2o}});
    for (std::size_t c = 0; c < 4; ++c) {
      EvalScore score{.config = {.policy = parse_policy(names[c])}, .budget_tokens = 64};
      if (c > 0) score.config.budget = parse_budget("64");
      score.kl = evaluation.kl.mean(c), score.perplexity = perplexity[c], score.kl_error = 0.01;
      score.tokens = 2000;
      score.memory = c == 3 ? h2o_memory : Memory{100, 100, 0, 100};
      evaluation.scores.push_back(score);
    }
    return evaluation;
  };
  const auto confirmed = confirm(evaluation_of({100, 100, 0, 100}), ballot);
  REQUIRE(confirmed.size() == 3);
  CHECK(ballot.winner == 2);  // h2o, which has the lowest KL
  CHECK(confirmed[0].rank == 2);
  CHECK(confirmed[1].rank == 1);
  CHECK(confirmed[1].is_similar());
  CHECK(confirmed[1].from_choice.mean == Approx(0.01));
  CHECK_FALSE(confirmed[2].is_similar());
  const auto json = confirmed_json(confirmed, metric_table, ballot);
  CHECK(json[1]["policy"] == "lru");
  CHECK(json[1]["not_significantly_different"] == true);
  CHECK(json[2]["from_choice"]["significantly_different"] == true);

  const auto more = confirm(evaluation_of({300, 300, 0, 100}), ballot);
  CHECK(ballot.winner == 1);
  CHECK(more[2].rank == 2);  // h2o has the lowest KL, but takes three times the budget
  CHECK(more[2].over_budget);
}

TEST_CASE("configurations that cannot be deployed are refused by name") {
  const MadeUp window{"window", "sinks=0:recent=0", 0.8, 0.01};
  Run run = made_up_run({window}, 2);
  CHECK_THROWS_WITH(deployed(run, "96"), ContainsSubstring("96") && ContainsSubstring("64, 128"));
  CHECK_THROWS_WITH(deployed(run, "64", "speed"), ContainsSubstring("--metric: 'speed'"));
  CHECK_THROWS_WITH(deployed(run, "64", "kv_bytes"), ContainsSubstring("--metric"));
  CHECK_THROWS_WITH(deployed(made_up_run({{"full", "", 0, 0}, {"oracle_attention", "", 0.1, 0}})),
                    ContainsSubstring("cannot be deployed"));
  CHECK_THROWS_WITH(deployed(made_up_run({{"mine", "", 0.1, 0}})),
                    ContainsSubstring("unknown policy 'mine'"));
  for (ResultRow& row : run.rows)
    if (row.trace == "trace1" && row.budget == "64") row.budget_tokens = 70;
  CHECK_THROWS_WITH(deployed(run, "64"), ContainsSubstring("64 to 70 tokens"));
  run = made_up_run({window}, 2);
  run.info.traces[1].weights_xxh3 = "1111111111111111";
  CHECK_THROWS_WITH(deployed(run), ContainsSubstring("different models"));
  for (RunTrace& trace : run.info.traces) trace.weights_xxh3 = "";
  CHECK_NOTHROW(deployed(run));
  run.info.traces[1].model = "other";
  CHECK_THROWS_WITH(deployed(run), ContainsSubstring("different models"));
}
