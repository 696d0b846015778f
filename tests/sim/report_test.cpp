// Tests of the report: it shows the metrics, and untrusted names cannot add markup to it.
#include "sim/report/report.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <limits>
#include <regex>

#include "policies/catalogue.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "tests/catch.hpp"
#include "tests/sim/run_fixture.hpp"
#include "tests/skip.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr const char* kNoVegaHere = "Vega is not installed (Debian: libjs-vega)";

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

Run whole_run() {
  Run run = made_up_run({{"window", "", 0.8, 0.01},
                         {"h2o", "", 0.3, 0.01},
                         {"oracle_attention", "", 0.1, 0.01},
                         {"oracle_topk", "", 0.05, 0.01},
                         {"full", "", 0, 0}});
  run.kept = Kept{.trace = "trace0",
                  .budget = "64",
                  .prefill = "dense",
                  .budget_tokens = 64,
                  .queries = {500, 501, 502},
                  .ids = {1, 2},
                  .heads = {{0,
                             1,
                             {{"h2o", "", "original", {{3, 500, 501}, {9, 500, 502}}}},
                             {{{3, 255}}, {}, {{9, 20}}}}}};
  return run;
}

/// The JSON in a page.
nlohmann::json data_of(const std::string& html) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const std::size_t at = html.find(open) + open.size();
  return parse_json(html.substr(at, html.find("</script>", at) - at), "the page");
}
std::string report_html(const Run& run, const ReportOptions& options = {}) {
  return page_html(report_page(run, options));
}
/// The recommendations and notes of the only model of a run.
nlohmann::ordered_json recommended(const Run& run) {
  return report_page(run).data["recommendations"][0];
}

}  // namespace

TEST_CASE("the report has a recommendation per budget and the next command") {
  const PageDocument page = report_page(whole_run(), {.folder = "five/run"});
  const auto& made = page.data["recommendations"][0];
  REQUIRE(made["budgets"].size() == 2);
  CHECK(made["budgets"][0]["choice"] == "h2o");
  CHECK(made["budgets"][0]["colour"] == "vermilion");
  CHECK(number_text(made["budgets"][0]["mean"].get<double>()) == "0.300");
  CHECK_THAT(made["notes"].back().get<std::string>(),
             ContainsSubstring("1 text, 25 scored tokens. ") &&
                 ContainsSubstring("Offline replay; task accuracy was not measured."));
  CHECK(page.data["facts"]["next"] == "kvlab deploy five/run --budget 64 --out policy.json");
}

TEST_CASE("without JavaScript a page shows the terminal's table of recommendations") {
  const Run run = whole_run();
  const PageDocument page = report_page(run);
  const MetricTable metric_table(run.rows);
  const auto made =
      recommendations_of(metric_table, *find_metric("nll_recall"), 25, std::string(kReplayNote));
  CHECK(page.text == recommendations_text(made));
  const std::string html = page_html(page);
  const std::size_t begin = html.find("<noscript>"), end = html.find("</noscript>");
  REQUIRE(end != html.npos);
  CHECK_THAT(html.substr(begin, end - begin), ContainsSubstring(escape(page.text)) &&
                                                  ContainsSubstring("JavaScript draws this page"));
}

TEST_CASE("policies that do not differ significantly are named, and no note repeats them") {
  const auto made = recommended(
      made_up_run({{"window", "", 0.8, 0.01}, {"lru", "", 0.31, 0.01}, {"h2o", "", 0.3, 0.01}}));
  CHECK(made["budgets"][0]["choice"] == "h2o");
  CHECK(made["budgets"][0]["not_significantly_different"] == nlohmann::ordered_json{"lru"});
  CHECK_THAT(made["notes"].dump(), !ContainsSubstring("Not significantly different"));
  CHECK_THAT(made["budgets"][0]["text"].get<std::string>(), ContainsSubstring("lru"));
  std::vector<MadeUp> policies;
  for (const char* policy : {"window", "sink", "lru", "h2o", "tova", "lfu"})
    policies.push_back({policy, "", 0.3, 0.01});
  CHECK(recommended(made_up_run(policies))["budgets"][0]["not_significantly_different"].size() ==
        5);
}

TEST_CASE("an oracle is drawn for attention metrics only, and not as a bound") {
  const Run run = made_up_run({{"h2o", "", 0.3, 0.01}, {"oracle_attention", "", 0.4, 0.01}});
  const auto data = report_page(run).data;
  for (const auto& metric : data["metrics"])
    CHECK(metric["oracles"].empty() ==
          !(metric["name"] == "miss_rate" ||
            metric["name"].get<std::string>().find("recall") != std::string::npos));
  CHECK_THAT(data["oracle_notes"]["nll_recall"].get<std::string>(),
             ContainsSubstring("At 64 and 128 the choice is better than oracle_attention.") &&
                 ContainsSubstring("it is not a bound"));
}

TEST_CASE("numbers have few digits, with their errors beside them") {
  CHECK(number_text(0.012345) == "0.0123");
  CHECK(number_text(1234567) == "1,234,567");
  CHECK(number_text(-1234) == "-1,234");
  CHECK(number_text(0) == "0");
  CHECK(average_text({0.12345, 0.00678}) == "0.123 ± 0.007");
  CHECK(average_text({0.12345, 0.000067}) == "0.12345 ± 0.00007");
  CHECK(average_text({35.126, 1.72}) == "35.1 ± 1.7");
  CHECK(average_text({0.5, std::numeric_limits<double>::infinity()}) == "0.500");
  CHECK(average_text({0.5, 1e300}).starts_with("0.500 ± 1000000000"));
  CHECK(average_text({1, NAN}) == "1.00");
  CHECK(average_text({.mean = 1, .standard_error = 0, .interval = {0.398, 1}}) ==
        "1.000 (0.398 to 1.000)");
  CHECK(bytes_text(1536) == "1.50 KiB");
  CHECK(join_names({"a", "b", "c"}) == "a, b and c");
}

TEST_CASE("text is escaped") {
  CHECK(escape("<a href=\"x\">'&'</a>") == "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
}

TEST_CASE("all series look different, and a policy has the same colour in every report") {
  std::vector<Series> shelf{{.policy = "oracle_attention"}, {.policy = "oracle_topk"}};
  for (const PolicyEntry& entry : policy_catalogue())
    shelf.push_back({.policy = std::string(entry.info.name)});
  shelf.push_back({.policy = "mine"});
  shelf.push_back({.policy = "yours"});
  const std::size_t plain = shelf.size();
  for (int variant = 0; variant < 60; ++variant)
    shelf.push_back({.policy = "h2o", .params = fmt::format("recent={}%", variant)});
  const auto styles = styles_of(shelf);
  for (std::size_t a = 0; a < styles.size(); ++a)
    for (std::size_t b = a + 1; b < styles.size(); ++b) {
      CHECK_FALSE(styles[a] == styles[b]);
      const bool oracles = shelf[a].is_oracle() && shelf[b].is_oracle();
      if (b < plain && !oracles) CHECK(styles[a].colour != styles[b].colour);
    }
  CHECK(styles.back().colour == "vermilion");
  std::vector<Series> reversed(shelf.rbegin(), shelf.rend());
  const auto other = styles_of(reversed);
  for (std::size_t s = 0; s < shelf.size(); ++s)
    CHECK(other[shelf.size() - 1 - s].colour == styles[s].colour);
  for (const SeriesStyle& style : styles) CHECK_NOTHROW(light_of(style.colour));
}

TEST_CASE("a figure as Vega-Lite has a description, dashes and markers") {
  const Run run = whole_run();
  const MetricTable metric_table(run.rows);
  const MetricInfo& metric = *find_metric("nll_recall");
  const auto spec = vega_lite(curve_figure(metric_table, {0, 1, 2}, metric));
  CHECK(spec["title"]["text"] == "−ln recall");
  const auto& plot = spec["hconcat"][0];
  CHECK(plot["data"]["values"].size() == 6);
  CHECK(plot["data"]["values"][0]["x"] == 64);
  CHECK(plot["layer"][2]["encoding"]["y"]["title"] == "−ln recall");
  CHECK(plot["layer"][2]["encoding"]["y"]["scale"]["type"] == "log");  // 0.05 to 0.8
  CHECK(plot["layer"][2]["encoding"]["strokeDash"]["scale"]["range"].size() == 3);
  CHECK(spec["hconcat"][1]["data"]["values"][1]["label"] == "h2o");
  const auto recall = curve_figure(metric_table, {0, 1, 2}, *find_metric("recall"));
  CHECK_FALSE(recall.y.logarithmic);
}

TEST_CASE("a frontier point is at the mean bytes, with a bar to the peak") {
  Run run = made_up_run({{"h2o", "", 0.4, 0.01}});
  for (const char* budget : {"64", "128"})
    for (const auto& [name, bytes] :
         {std::pair{"kv_bytes_mean", 2048.0}, {"kv_bytes_peak", 8192.0}})
      run.rows.push_back(made_up_row({"h2o", "", 0, NAN}, "trace0", budget, name, bytes));
  const MetricTable metric_table(run.rows);
  const Figure figure = frontier_figure(metric_table, {0}, *find_metric("nll_recall"));
  REQUIRE(figure.series.size() == 1);
  const FigurePoint& point = figure.series[0].points.at(0);
  CHECK(point.x == 2);  // KiB
  CHECK(point.x_high == 8);
  CHECK(point.y == Approx(0.4));
  CHECK(point.note == "budget 64");
  CHECK(figure.x.base == 2);
  CHECK(figure.x.ticks.empty());  // the renderer chooses the ticks within its axis
}

TEST_CASE("a value of 0 is drawn at the bottom of a logarithmic axis of errors") {
  const Run run =
      made_up_run({{"window", "", 0.8, 0.01}, {"h2o", "", 0.05, 0.1}, {"lru", "", 0, 0}});
  const MetricTable metric_table(run.rows);
  const Figure figure = curve_figure(metric_table, {0, 1, 2}, *find_metric("nll_recall"));
  CHECK(figure.y.logarithmic);
  const auto spec = vega_lite(figure);
  double lowest = 1;
  for (const auto& row : spec["hconcat"][0]["data"]["values"]) {
    lowest = std::min(lowest, row["y"].get<double>());
    if (row.contains("y_low")) CHECK(row["y_low"].get<double>() > 0);
  }
  CHECK(lowest == Approx(0.0125));  // half of the smallest value above 0
  CHECK_THAT(spec["hconcat"][0]["layer"][2]["encoding"]["y"]["title"].get<std::string>(),
             ContainsSubstring("0 is drawn at the bottom"));
}

TEST_CASE("the report says what the run was made from") {
  const auto data = report_page(whole_run()).data;
  for (const char* part :
       {"explore", "Metrics by budget", "By layer and head", "Which tokens were kept",
        "All metrics", "Where this comes from", "queries and keys come from the full-cache run"})
    CHECK_THAT(std::string(page_file("replay.js")), ContainsSubstring(part));
  const auto& facts = data["facts"];
  CHECK(facts["traces"][0]["hash"] == "0123456789abcdef");
  CHECK(facts["traces"][0]["weights"] == "fedcba9876543210");
  CHECK(facts["queries"] == "of decode segments");
  CHECK_THAT(report_html(whole_run()), ContainsSubstring("prefers-color-scheme: dark"));
}

TEST_CASE("oracle_topk is drawn only for metrics that it bounds") {
  const auto drawn = [](const Run& run) {
    const auto data = report_page(run).data;
    for (const auto& one : data["series"])
      if (one["policy"] == "oracle_topk") return !one.contains("bound");
    return false;
  };
  Run run = whole_run();
  CHECK(drawn(run));
  for (ResultRow& row : run.rows) row.prefill = "chunk:32";
  CHECK_FALSE(drawn(run));
  for (ResultRow& row : run.rows) row.prefill = "stream";
  run.info.queries = Queries::all;
  CHECK(drawn(run));
  for (ResultRow& row : run.rows) row.prefill = "dense";
  CHECK_FALSE(drawn(run));
}

TEST_CASE("a budget that the run lacks is refused by name") {
  const Run run = whole_run();
  CHECK_THROWS_WITH(report_html(run, {.budget = "96"}),
                    ContainsSubstring("96") && ContainsSubstring("64, 128"));
}

TEST_CASE("a run of one budget and one policy makes a report") {
  Run run = made_up_run({{"lru", "", 0.3, NAN}});
  std::erase_if(run.rows, [](const ResultRow& row) { return row.budget != "64"; });
  const auto made = recommended(run);
  REQUIRE(made["budgets"].size() == 1);
  CHECK(made["budgets"][0]["choice"] == "lru");
  CHECK(made["budgets"][0]["runner_up"].is_null());
  CHECK(made["budgets"][0]["difference"].is_null());
}

TEST_CASE("the interactive report contains its figures and scripts and is self-contained") {
  if (!vega_script()) return skip(kNoVegaHere);
  const std::string html = report_html(whole_run());
  const auto data = data_of(html);
  CHECK(data["series"].size() == 5);
  CHECK(data["budgets"][0]["tokens"] == 64);
  CHECK(data["headline"] == "nll_recall");
  CHECK(data["layers"] == nlohmann::json{0});
  CHECK(data["heads"] == 2);
  CHECK(data["values"][0]["nll_recall"]["head"]["count"] == 100);
  CHECK(data["kept"]["heads"][0]["attention"][0] == nlohmann::json{3, 255});
  CHECK(data["kept"]["heads"][0]["series"][0]["lives"] == nlohmann::json{3, 500, 501, 9, 500, 502});
  for (const char* part : {"default-src 'none'", "BSD-3-Clause", "nll_recall: ['0.41', '0.91']"})
    CHECK_THAT(html, ContainsSubstring(part));
  CHECK_FALSE(std::regex_search(html, std::regex("<script[^>]*src|<link|@import|<img")));
  CHECK(html.size() < 700'000);
}

TEST_CASE("untrusted names stay inside the report's JSON") {
  if (!vega_script()) return skip(kNoVegaHere);
  const std::string name = "</script><script>alert(1)</script><!--\u202e\"'";
  Run run = made_up_run({{name, "a=<b>", 0.3, 0.01}, {"window", "", 0.8, 0.01}});
  run.info.traces[0].model = name + std::string(10'000, 'x');
  const std::string html = report_html(run);
  CHECK(count_of(html, "<script") == 3);  // data, Vega, kvlab's script
  CHECK(count_of(html, "</script") == 3);
  CHECK(data_of(html)["series"][0]["policy"] == name);
}

TEST_CASE(
    "models are never averaged: each has a separate recommendation, and a joint figure is "
    "refused") {
  Run run = made_up_run({{"window", "", 0.8, 0.01}, {"h2o", "", 0.3, 0.01}}, 2);
  run.info.traces[1].model = "other";
  run.info.traces[1].weights_xxh3 = "00000000000000ff";
  CHECK_THROWS_WITH(write_figures(run, "", AtomicFolder("none")), ContainsSubstring("2 models") &&
                                                                      ContainsSubstring("tiny") &&
                                                                      ContainsSubstring("other"));
  if (!vega_script()) return skip(kNoVegaHere);
  const std::string html = report_html(run);
  const auto data = data_of(html);
  CHECK(data["groups"].size() == 2);
  CHECK(data["groups"][1]["name"] == "other");
  CHECK(data["recommendations"].size() == 2);
  CHECK(data["recommendations"][1]["name"] == "other");
  CHECK(data["values"].size() == 2);
  CHECK(data["facts"]["next"] == "");  // only for one model
  CHECK(!data.contains("figures"));    // the frontier is drawn only for one model
}

TEST_CASE("a report of several models opens with the budget and the choice of the first one") {
  Run run = made_up_run({{"h2o", "", 0.4, 0.01}, {"window", "", 0.3, 0.01}}, 2);
  run.info.traces[1].model = "other";
  run.info.traces[1].weights_xxh3 = "00000000000000ff";
  for (ResultRow& row : run.rows)
    if (row.trace == "trace1" && row.policy == "window") row.value += 5;
  const auto data = report_page(run).data;
  CHECK(data["recommendations"][0]["budgets"][0]["choice"] == "window");
  CHECK(data["recommendations"][1]["budgets"][0]["choice"] == "h2o");
  CHECK(data["series"][data["winner"].get<std::size_t>()]["policy"] == "window");
}

TEST_CASE("a report of many policies, layers and heads stays under three megabytes") {
  if (!vega_script()) return skip(kNoVegaHere);
  Run run = made_up_run({});
  run.info.traces[0].layers = 30;
  run.info.traces[0].kv_heads = 9;
  for (int policy = 0; policy < 24; ++policy)
    for (int budget = 0; budget < 8; ++budget)
      for (int layer = -1; layer < 30; ++layer)
        for (int head = -1; head < (layer < 0 ? 0 : 9); ++head)
          for (const char* metric : {"recall", "nll_recall", "miss_rate", "output_error",
                                     "residual_error", "kl_estimate", "kl_estimate_joint",
                                     "evictions", "live_max", "kv_bytes", "state_bytes"})
            run.rows.push_back(made_up_row({fmt::format("policy{}", policy), "", 0, 0.001},
                                           "trace0", std::to_string(16 << budget), metric,
                                           1.0 / (1 + policy + budget + 0.37 * layer * head), layer,
                                           head));
  const std::string html = report_html(run);
  CHECK(html.size() < 3'000'000);
  CHECK_THAT(html, ContainsSubstring("Values by layer and by head have four digits"));
  if (const char* const file = std::getenv("KVLAB_LARGE_PAGE")) write_file_atomically(file, html);
}
