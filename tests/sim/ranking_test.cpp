// Tests of the order of policies, and of which policies do not differ significantly from the
// winner.
#include "sim/run/ranking.hpp"

#include "tests/catch.hpp"
#include "tests/sim/run_fixture.hpp"

using namespace kvlab;

namespace {

const MetricInfo& nll() { return *find_metric("nll_recall"); }

std::string order(const MetricTable& metric_table, const Ranking& ranking) {
  std::string text;
  for (const RankedPolicy& entry : ranking.ranked)
    text += metric_table.series()[entry.series].label + (entry.is_similar ? "= " : " ");
  return text;
}

}  // namespace

TEST_CASE("policies are ranked; oracles and full are not") {
  const Run run = made_up_run({{"window", "", 0.8, 0.01},
                               {"h2o", "", 0.3, 0.01},
                               {"lru", "", 0.31, 0.01},
                               {"oracle_attention", "", 0.1, 0.01},
                               {"oracle_topk", "", 0.05, 0.01},
                               {"full", "", 0, 0}});
  const MetricTable metric_table(run.rows);
  CHECK(order(metric_table, rank_policies(metric_table, "64", nll())) == "h2o= lru= window ");
  CHECK(order(metric_table, rank_policies(metric_table, "64", *find_metric("recall"))) ==
        "h2o= lru= window ");
  CHECK(rank_policies(metric_table, "96", nll()).empty());
  CHECK(metric_table.average(5, "64", "recall")->mean == 1);  // full, at any budget
}

TEST_CASE("a difference whose interval over blocks of queries includes zero is not significant") {
  // The difference of two policies has a standard error of 0.01 * sqrt(2). Multiplied by 2.131, the
  // value of Student's t for 16 blocks, this gives an interval of +-0.0301.
  const Run run =
      made_up_run({{"h2o", "", 0.3, 0.01}, {"sink", "", 0.330, 0.01}, {"lru", "", 0.331, 0.01}});
  const MetricTable metric_table(run.rows);
  CHECK(order(metric_table, rank_policies(metric_table, "64", nll())) == "h2o= sink= lru ");
  CHECK(metric_table.difference(0, 0, "64", "nll_recall")->standard_error == 0);
}

TEST_CASE("without intervals nothing is significantly different") {
  const Run run =
      made_up_run({{"lru", "", 0.5, NAN}, {"h2o", "", 0.3, NAN}, {"sink", "", 0.3, NAN}});
  const MetricTable metric_table(run.rows);
  const Ranking ranking = rank_policies(metric_table, "64", nll());
  CHECK(order(metric_table, ranking) == "h2o= sink= lru= ");
  CHECK(ranking.winner == 0);  // the lowest mean; at equal means, the first name
}

TEST_CASE("over several traces, standard errors come from each trace's mean or paired difference") {
  const Run run = made_up_run({{"h2o", "", 0.3, 0.001}, {"sink", "", 0.4, 0.001}}, 3);
  const MetricTable metric_table(run.rows);
  const Average average = *metric_table.average(0, "64", "nll_recall");
  CHECK(average.mean == Approx(0.4));
  CHECK(average.standard_error == Approx(0.1 / std::sqrt(3)));
  CHECK(average.texts == 3);
  // The two policies have the same difference on every trace.
  const Difference difference = *metric_table.difference(1, 0, "64", "nll_recall");
  CHECK(difference.mean == Approx(0.1));
  CHECK(difference.standard_error < 1e-12);
  CHECK(order(metric_table, rank_policies(metric_table, "64", nll())) == "h2o= sink ");
}

TEST_CASE("the memory of the full cache is that in 16 bit, for every order of the sweep") {
  const MadeUp quantized{"full", "tiers=4", 0, 0}, exact{"full", "", 0, 0},
      h2o{"h2o", "", 0.3, 0.1};
  for (const auto& policies :
       {std::vector{quantized, exact, h2o}, std::vector{h2o, exact, quantized}}) {
    Run run = made_up_run(policies);
    for (const MadeUp& policy : policies) {
      const bool full = policy.policy == "full";
      run.rows.push_back(made_up_row(policy, "trace0", full ? "all" : "64", "kv_bytes_mean",
                                     !full                   ? 64e3
                                     : policy.params.empty() ? 1e6
                                                             : 28e4));
    }
    const Ranking ranking = rank_policies(MetricTable(run.rows), "64", nll());
    CHECK(ranking.recommendation.scope.full_bytes == 1e6);
  }
}

TEST_CASE("a trace that appears under two names counts once") {
  Run run = made_up_run({{"h2o", "", 0.3, 0.001}, {"sink", "", 0.4, 0.001}}, 2);
  for (ResultRow& row : run.rows) row.text = "the same";
  const MetricTable metric_table(run.rows);
  CHECK(metric_table.average(0, "64", "nll_recall")->texts == 1);
  CHECK(metric_table.difference(1, 0, "64", "nll_recall")->texts == 1);
}

TEST_CASE("a trace whose text is part of a longer one does not count") {
  Run run = made_up_run({{"h2o", "", 0.3, 0.001}, {"sink", "", 0.4, 0.001}}, 3);
  for (ResultRow& row : run.rows) row.counts = row.trace != "trace1";
  const MetricTable metric_table(run.rows);
  CHECK(metric_table.average(0, "64", "nll_recall")->texts == 2);
  // The mean of 0.3, 0.4 and 0.5
  CHECK(metric_table.average(0, "64", "nll_recall")->mean == Approx(0.4));
  for (ResultRow& row : run.rows) row.counts = false;
  CHECK(!MetricTable(run.rows).average(0, "64", "nll_recall"));
}

TEST_CASE(
    "for one trace, the standard error is that of its row, and the interval follows from it") {
  Run run = made_up_run({{"h2o", "", 0.3, 0.01}});
  const Average plain = *MetricTable(run.rows).average(0, "64", "nll_recall");
  // The rows get larger errors, as if these included the variance of a sketch.
  for (ResultRow& row : run.rows) row.standard_error *= 2;
  const Average average = *MetricTable(run.rows).average(0, "64", "nll_recall");
  CHECK(average.standard_error == Approx(2 * plain.standard_error));
  CHECK(average.interval.high - average.mean == Approx(2 * (plain.interval.high - plain.mean)));
}

TEST_CASE("several series are averaged over the traces that they share") {
  Run run = made_up_run({{"h2o", "", 0.3, 0.001}, {"sink", "", 0.4, 0.001}}, 3);
  std::erase_if(run.rows, [](const ResultRow& row) {
    return row.policy == "sink" ? row.trace == "trace0" : row.trace == "trace2";
  });
  const MetricTable metric_table(run.rows);
  const std::size_t both[] = {0, 1};
  const auto common = metric_table.average_common(both, "64", "nll_recall");
  CHECK(common.averages[0].mean == Approx(0.4));  // only trace1
  CHECK(common.averages[1].mean == Approx(0.5));
  CHECK(common.difference->mean == Approx(0.1));
  CHECK(common.difference->texts == 1);
  std::erase_if(run.rows, [](const ResultRow& row) { return row.trace == "trace1"; });
  const auto none = MetricTable(run.rows).average_common(both, "64", "nll_recall");
  CHECK(none.averages[0].mean == Approx(0.3));
  CHECK(!none.difference);
}

TEST_CASE("a policy over the budget is never ranked") {
  Run run = made_up_run({{"snapkv", "sinks=0:recent=32:once", 0.1, 0.001},
                         {"h2o", "sinks=0:recent=50%", 0.3, 0.001}});
  for (const auto& [policy, params, bytes] : {std::tuple("snapkv", "sinks=0:recent=32:once", 26e3),
                                              std::tuple("h2o", "sinks=0:recent=50%", 1e3)})
    for (const char* metric : {"kv_bytes_mean", "kv_bytes_peak", "budget_bytes"})
      run.rows.push_back(made_up_row({policy, params, 0, NAN}, "trace0", "64", metric,
                                     metric == std::string("budget_bytes") ? 1e3 : bytes));
  for (ResultRow& row : run.rows) row.text.clear();
  const MetricTable metric_table(run.rows);
  const Ranking ranking = rank_policies(metric_table, "64", nll());
  CHECK(order(metric_table, ranking) == "h2o= snapkv ");
  CHECK(ranking.ranked[1].over_budget);
  CHECK(ranking.recommendation.frontier.size() == 2);
}

TEST_CASE("a label contains the settings in which the series differ") {
  Run run = made_up_run({{"h2o", "sinks=0:recent=50%", 0.3, 0},
                         {"h2o", "sinks=0:recent=25%", 0.3, 0},
                         {"sink", "sinks=4:recent=0", 0.3, 0}});
  for (ResultRow row : std::vector<ResultRow>(run.rows)) {
    if (row.policy != "sink") continue;
    row.positions = "cache";
    run.rows.push_back(row);
  }
  const MetricTable metric_table(run.rows);
  std::string labels;
  for (const Series& series : metric_table.series()) labels += series.label + "; ";
  CHECK(labels == "h2o; h2o:recent=25%; sink (original positions); sink (cache positions); ");
}

TEST_CASE("a budget is found as requested, or in tokens if all traces agree") {
  Run run = made_up_run({{"h2o", "", 0.3, 0}}, 2);
  for (ResultRow& row : run.rows)
    if (row.budget == "128") row.budget = "20%";
  MetricTable metric_table(run.rows);
  CHECK(metric_table.find_budget("20%") != nullptr);
  CHECK(metric_table.find_budget("128") == metric_table.find_budget("20%"));
  CHECK(metric_table.find_budget("96") == nullptr);
  for (ResultRow& row : run.rows)
    if (row.budget == "20%" && row.trace == "trace1") row.budget_tokens = 130;
  const MetricTable uneven(run.rows);
  CHECK(uneven.find_budget("20%")->max_tokens == 130);
  CHECK(uneven.find_budget("128") == nullptr);
}
