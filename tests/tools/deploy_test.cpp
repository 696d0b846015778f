// Who is deployed, with which evidence.
#include "engine/loop/deploy.hpp"

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
