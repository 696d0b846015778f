// The page: says what the figures say, lets nothing in that is not its own.
#include "sim/report/report.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <regex>

#include "sim/report/answer.hpp"
#include "sim/report/gnuplot.hpp"
#include "sim/report/html.hpp"
#include "sim/report/interactive/vega.hpp"
#include "sim/report/palette.hpp"
#include "tests/catch.hpp"
#include "tests/sim/run_fixture.hpp"
#include "tests/skip.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

bool has_gnuplot() { return std::system("gnuplot --version >/dev/null 2>&1") == 0; }

constexpr const char* kNoGnuplot = "gnuplot is not installed (Debian: gnuplot-nox)";

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

std::string answer(const Run& run) {
  const Figures figures(run.rows);
  return answer_html(figures, *figures.find_budget("64"), *find_metric("nll_recall"), 500);
}

Run whole_run() {
  Run run = made_up_run({{"window", "", 0.8, 0.01},
                         {"h2o", "", 0.3, 0.01},
                         {"oracle_mass", "", 0.1, 0.01},
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

}  // namespace

TEST_CASE("the answer names the best, window and the oracle") {
  const std::string text = answer(whole_run());
  CHECK_THAT(text, ContainsSubstring("<strong>h2o</strong> has the least loss in −ln recall, told "
                                     "apart from all others") &&
                       ContainsSubstring("−ln recall of h2o is") &&
                       ContainsSubstring("On this text, 500 scored tokens"));
  CHECK_THAT(text, ContainsSubstring("0.300&nbsp;±&nbsp;0.010") &&
                       ContainsSubstring("0.800&nbsp;±&nbsp;0.010 for window") &&
                       ContainsSubstring("0.100&nbsp;±&nbsp;0.010 for oracle_mass"));
  CHECK_THAT(text, ContainsSubstring("closes 71% of the gap between window and oracle_mass"));
  CHECK_THAT(text, ContainsSubstring("2 budgets it is first alone at 2"));
}

TEST_CASE("the answer says a tie as a tie") {
  const std::string text = answer(
      made_up_run({{"window", "", 0.8, 0.01}, {"lru", "", 0.31, 0.01}, {"h2o", "", 0.3, 0.01}}));
  CHECK_THAT(text, ContainsSubstring("<strong>lru</strong> and h2o cannot be told apart") &&
                       ContainsSubstring("lru is the first of the grid"));
  CHECK_THAT(text, ContainsSubstring("not told apart from the first at 2"));
}

TEST_CASE("of many that tie the first is named, and the others open") {
  std::vector<MadeUp> policies;
  for (const char* policy : {"window", "sink", "lru", "h2o", "tova", "lfu"})
    policies.push_back({policy, "", 0.3, 0.01});
  CHECK_THAT(
      report_html(made_up_run(policies), {.fixed = true}),
      ContainsSubstring("<details><summary>") && ContainsSubstring(" and 4 others</summary>"));
}

TEST_CASE("figures are written with few digits and their errors beside them") {
  CHECK(figure_text(0.012345) == "0.0123");
  CHECK(figure_text(1234567) == "1,234,567");
  CHECK(figure_text(-1234) == "-1,234");
  CHECK(figure_text(0) == "0");
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
  CHECK(gnuplot_string("it's `date`\n") == "'it''s `date` '");
}

TEST_CASE("a policy looks the same everywhere, and its variants look related") {
  const auto styles = styles_of(std::vector<Series>{{.policy = "h2o"},
                                                    {.policy = "mine"},
                                                    {.policy = "h2o", .params = "recent=25%"},
                                                    {.policy = "yours"}});
  CHECK(styles[0].colour == "vermilion");
  CHECK(styles[2].colour == "vermilion");
  CHECK(styles[0].dash != styles[2].dash);
  CHECK(styles[0].point != styles[2].point);
  CHECK(styles[1].colour != styles[3].colour);
}

TEST_CASE("the page holds every section and needs nothing else") {
  if (!has_gnuplot()) return skip(kNoGnuplot);
  const std::string html = report_html(whole_run(), {.fixed = true});
  for (const char* part :
       {"What each budget buys", "Where it is lost", "What was kept over time", "All figures",
        "Where this comes from", "queries and keys come from the full-cache run",
        "0123456789abcdef", "fedcba9876543210", "prefers-color-scheme: dark"})
    CHECK_THAT(html, ContainsSubstring(part));
  // Four curves, three maps (regret too), one kept head.
  CHECK(count_of(html, "<svg ") == 8);
  CHECK_THAT(html, ContainsSubstring("less oracle_mass"));
  CHECK_FALSE(std::regex_search(html, std::regex("<script|<link|<img|@import|url\\(|https?:")));
  // Ids are unique, and every reference leads to one of them.
  std::map<std::string, int> ids;
  const std::regex id("\\sid=['\"]([^'\"]+)"), reference("href=['\"]#([^'\"]+)");
  for (std::sregex_iterator m(html.begin(), html.end(), id), end; m != end; ++m) ++ids[(*m)[1]];
  for (const auto& [name, count] : ids) CHECK(count == 1);
  for (std::sregex_iterator m(html.begin(), html.end(), reference), end; m != end; ++m)
    CHECK(ids.contains((*m)[1]));
}

TEST_CASE("oracle_topk is drawn only where it is a bound") {
  if (!has_gnuplot()) return skip(kNoGnuplot);
  const auto drawn = [](Run run) {
    return count_of(report_html(run, {.fixed = true}), "<text>oracle_topk</text>");
  };
  Run run = whole_run();
  CHECK(drawn(run) == 3);  // -ln recall, recall and miss rate, but not the output error
  for (ResultRow& row : run.rows) row.prefill = "chunk:32";
  CHECK(drawn(run) == 0);
  for (ResultRow& row : run.rows) row.prefill = "stream";
  run.info.span = Span::all;
  CHECK(drawn(run) == 3);
  for (ResultRow& row : run.rows) row.prefill = "dense";
  CHECK(drawn(run) == 0);
}

TEST_CASE("names from a stranger's run are text, never code") {
  if (!has_gnuplot()) return skip(kNoGnuplot);
  const std::string name = "x'; system 'touch owned'; '<script>alert(1)</script>`touch owned`";
  Run run = made_up_run({{name, "a=<b>", 0.3, 0.01}, {"window", "", 0.8, 0.01}});
  run.info.traces[0].model = "<i>m</i>";
  const std::string html = report_html(run, {.fixed = true});
  CHECK(html.find("<script") == std::string::npos);
  CHECK(html.find("<i>m") == std::string::npos);
  CHECK_THAT(html, ContainsSubstring("&lt;script&gt;"));
  CHECK_FALSE(std::filesystem::exists("owned"));
}

TEST_CASE("a budget that the run lacks is refused by name") {
  const Run run = whole_run();
  CHECK_THROWS_WITH(report_html(run, {.budget = "96"}),
                    ContainsSubstring("96") && ContainsSubstring("64, 128"));
}

TEST_CASE("a run of one budget and one policy makes a page") {
  if (!has_gnuplot()) return skip(kNoGnuplot);
  Run run = made_up_run({{"lru", "", 0.3, NAN}});
  std::erase_if(run.rows, [](const ResultRow& row) { return row.budget != "64"; });
  CHECK_THAT(report_html(run, {.fixed = true}), ContainsSubstring("stands alone"));
}

namespace {

constexpr const char* kNoVegaHere = "Vega is not installed (Debian: libjs-vega)";

/// The JSON of an interactive page.
nlohmann::json data_of(const std::string& html) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const std::size_t at = html.find(open) + open.size();
  return parse_json(html.substr(at, html.find("</script>", at) - at), "the page");
}

}  // namespace

TEST_CASE("the interactive page holds its figures, its scripts and nothing from elsewhere") {
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
  for (const char* part : {"id=\"explore\"", "id=\"heads\"", "default-src 'none'", "BSD-3-Clause",
                           "rank correlation .41 to .91"})
    CHECK_THAT(html, ContainsSubstring(part));
  CHECK_FALSE(std::regex_search(html, std::regex("<script[^>]*src|<link|@import|<img")));
  CHECK(html.size() < 700'000);
}

TEST_CASE("a stranger's names stay inside the page's JSON") {
  if (!vega_script()) return skip(kNoVegaHere);
  const std::string name = "</script><script>alert(1)</script><!--\u202e\"'";
  Run run = made_up_run({{name, "a=<b>", 0.3, 0.01}, {"window", "", 0.8, 0.01}});
  run.info.traces[0].model = name + std::string(10'000, 'x');
  const std::string html = report_html(run);
  CHECK(count_of(html, "<script") == 3);  // data, Vega, ours
  CHECK(count_of(html, "</script") == 3);
  CHECK(data_of(html)["series"][0]["policy"] == name);
}

TEST_CASE("models are never averaged: each has its own answer, and fixed pictures are refused") {
  Run run = made_up_run({{"window", "", 0.8, 0.01}, {"h2o", "", 0.3, 0.01}}, 2);
  run.info.traces[1].model = "other";
  run.info.traces[1].weights_xxh3 = "00000000000000ff";
  CHECK_THROWS_WITH(report_html(run, {.fixed = true}), ContainsSubstring("2 models") &&
                                                           ContainsSubstring("tiny") &&
                                                           ContainsSubstring("other"));
  if (!vega_script()) return skip(kNoVegaHere);
  const std::string html = report_html(run);
  const auto data = data_of(html);
  CHECK(data["groups"].size() == 2);
  CHECK(data["groups"][1]["name"] == "other");
  CHECK_THAT(html, ContainsSubstring("<strong>other</strong>: At 64 tokens"));
}

TEST_CASE("a page of many policies, layers and heads stays under three megabytes") {
  if (!vega_script()) return skip(kNoVegaHere);
  Run run = made_up_run({});
  run.info.traces[0].layers = 30;
  run.info.traces[0].kv_heads = 9;
  for (int policy = 0; policy < 24; ++policy)
    for (int budget = 0; budget < 8; ++budget)
      for (int layer = -1; layer < 30; ++layer)
        for (int head = -1; head < (layer < 0 ? 0 : 9); ++head)
          for (const char* metric : {"recall", "nll_recall", "miss_rate", "output_error",
                                     "residual_error", "kl_estimate", "calibrated_error",
                                     "evictions", "live_max", "kv_bytes", "state_bytes"})
            run.rows.push_back(made_up_row({fmt::format("policy{}", policy), "", 0, 0.001},
                                           "trace0", std::to_string(16 << budget), metric,
                                           1.0 / (1 + policy + budget + 0.37 * layer * head), layer,
                                           head));
  const std::string html = report_html(run);
  CHECK(html.size() < 3'000'000);
  CHECK_THAT(html, ContainsSubstring("By head: four digits"));
  if (const char* const file = std::getenv("KVLAB_LARGE_PAGE")) write_file_atomically(file, html);
}
