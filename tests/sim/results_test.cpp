// Tests of results.csv: written rows read back, and invalid rows are refused with their line
// number.
#include "sim/run/results.hpp"

#include <cmath>
#include <limits>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;

namespace {

ResultRow row() {
  return {.trace = "book",
          .policy = "h2o",
          .params = "sinks=0:recent=50%",
          .budget = "20%",
          .budget_tokens = 204,
          .prefill = "chunk:7",
          .positions = "cache",
          .queries = "decode",
          .threshold = 0.01,
          .seed = 18446744073709551615u,
          .layer = 3,
          .head = 1,
          .metric = "nll_recall",
          .value = 0.1 + 0.2,
          .standard_error = 1e-17,
          .count = 12345678901234,
          .tier_plan = "16:5t,4:100%",
          .budget_bytes = 1536};
}

const std::string kHeader = results_csv({});

/// The error message that refuses `text`; empty if it is read.
std::string refusal(const std::string& text) {
  return error_of([&] { parse_results_csv(text, "results.csv"); });
}

/// A valid row with one column replaced.
std::string replace_column(std::size_t column, const std::string& value) {
  std::string fields[] = {"book",     "h2o",    "recent=50%", "64",  "64",  "dense",
                          "original", "decode", "0.01",       "0",   "all", "all",
                          "recall",   "0.5",    "0.01",       "100", "16",  "1024"};
  fields[column] = value;
  std::string line;
  for (const std::string& field : fields) line += field + ",";
  line.back() = '\n';
  return kHeader + line;
}

}  // namespace

TEST_CASE("results read back to the same bytes and values") {
  ResultRow odd = row();
  odd.trace = "a, \"quoted\" name";
  odd.layer = odd.head = -1;
  odd.standard_error = std::numeric_limits<double>::quiet_NaN();
  odd.value = 5e-324;
  const std::vector<ResultRow> rows{row(), odd};
  const std::string text = results_csv(rows);
  const auto read = parse_results_csv(text, "results.csv");
  REQUIRE(read.size() == 2);
  CHECK(results_csv(read) == text);
  CHECK(read[0].value == row().value);
  CHECK(read[0].seed == row().seed);
  CHECK(read[0].head == 1);
  CHECK(read[1].trace == odd.trace);
  CHECK(read[1].layer == -1);
  CHECK(std::isnan(read[1].standard_error));
  CHECK(read[1].value == 5e-324);
}

TEST_CASE("results have the documented columns") {
  CHECK(kHeader ==
        "trace,policy,params,budget,budget_tokens,prefill,positions,queries,threshold,seed,layer,"
        "head,"
        "metric,value,stderr,count,tiers,budget_bytes\n");
  const std::vector<ResultRow> rows{row()};
  CHECK(
      results_csv(rows) ==
      kHeader +
          "book,h2o,sinks=0:recent=50%,20%,204,chunk:7,cache,decode,0.01,18446744073709551615,3,1,"
          "nll_recall,0.30000000000000004,1e-17,12345678901234,\"16:5t,4:100%\",1536\n");
}

TEST_CASE("results of runs from before tier plans are read") {
  std::string older = replace_column(0, "book");
  for (const std::string part : {",tiers,budget_bytes", ",16,1024"})
    older.erase(older.find(part), part.size());
  const auto read = parse_results_csv(older, "results.csv");
  REQUIRE(read.size() == 1);
  CHECK(read[0].count == 100);
  CHECK(read[0].tier_plan == "16");
  CHECK(std::isnan(read[0].budget_bytes));
}

TEST_CASE("a metric that some traces lack does not decide, and the reason is given") {
  const auto row = [](const char* trace, const char* metric) {
    return ResultRow{.trace = trace, .policy = "h2o", .metric = metric, .value = 1};
  };
  std::vector<ResultRow> rows{row("a", "layer_error"), row("a", "residual_error"),
                              row("b", "layer_error")};
  CHECK(best_metric(rows) == "layer_error");
  CHECK(best_metric_text(rows) ==
        "the metric to choose by is layer_error, because trace b has no residual_error, which "
        "trace a has");
  rows.push_back(row("b", "residual_error"));
  CHECK(best_metric(rows) == "residual_error");
  CHECK(best_metric_text(rows).empty());
  CHECK(best_metric_text(std::vector{row("a", "recall")}).empty());
}

TEST_CASE("a metric whose value is NaN has no row") {
  const std::vector<CacheConfig> sweep{{.policy = parse_policy("full"), .budget = {.all = true}}};
  ReplayResult result{.budget_tokens = {100}};
  result.measurements.push_back({0, 0, 0, "recall", 1, NAN, 5});
  result.measurements.push_back({0, 0, 0, "miss_rate", NAN, NAN, 0});
  const auto rows = result_rows("book", sweep, {}, result);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].metric == "recall");
  CHECK(rows[0].budget == "all");
  CHECK(rows[0].params.empty());
  CHECK(rows[0].tier_plan == "16");
  CHECK(std::isnan(rows[0].budget_bytes));
}

TEST_CASE("a bad row is refused with its line number") {
  REQUIRE(refusal(replace_column(0, "book")).empty());
  struct Bad {
    std::size_t column;
    const char* value;
    const char* says;
  };
  const Bad bad = GENERATE(
      Bad{0, "", "trace is empty"}, Bad{0, "a\tb", "control character"}, Bad{4, "0", "at least 1"},
      Bad{4, "4294967296", "budget_tokens '4294967296'"}, Bad{4, "64.5", "whole number"},
      Bad{5, "later", "prefill"}, Bad{6, "mine", "positions"}, Bad{7, "some", "queries"},
      Bad{8, "nan", "threshold 'nan'"}, Bad{9, "-1", "seed '-1'"}, Bad{10, "-1", "layer"},
      Bad{11, "0", "a head is given without a layer"}, Bad{12, "speed", "unknown metric 'speed'"},
      Bad{13, "nan", "finite number"}, Bad{13, "inf", "finite number"},
      Bad{13, "", "finite number"}, Bad{13, "1e400", "finite number"},
      Bad{13, "0x10", "finite number"}, Bad{13, "-1", "should be between"},
      Bad{13, "1e101", "should be between"}, Bad{14, "-0.5", "stderr is negative"},
      Bad{15, "1.5", "whole number"}, Bad{16, "5", "'5' is not a format"},
      Bad{17, "-1", "budget_bytes is negative"});
  const std::string message = refusal(replace_column(bad.column, bad.value));
  CAPTURE(bad.value);
  CHECK_THAT(message, ContainsSubstring("results.csv: line 2: ") && ContainsSubstring(bad.says));
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("a file that is not a results table is refused") {
  CHECK_THAT(refusal(""), ContainsSubstring("line 1") && ContainsSubstring("header"));
  CHECK_THAT(refusal("policy,value\n"), ContainsSubstring("line 1"));
  CHECK_THAT(refusal(kHeader + "book,h2o\n"),
             ContainsSubstring("line 2: 2 columns; there should be 18"));
  CHECK_THAT(refusal(replace_column(15, "100,7")), ContainsSubstring("line 2: 19 columns"));
  CHECK_THAT(refusal(replace_column(0, "\"open")),
             ContainsSubstring("line 2: a quoted field is never closed"));
  CHECK_THAT(refusal(replace_column(0, "\"a\"b")), ContainsSubstring("after a closing quote"));
  CHECK_THAT(refusal(replace_column(0, "a\"b")), ContainsSubstring("quote inside a field"));
  const std::string good = replace_column(0, "book");
  CHECK_THAT(refusal(good + good.substr(kHeader.size())),
             ContainsSubstring("line 3: repeats the row of line 2"));
}

TEST_CASE("every truncation of a results file is read or refused, without other errors") {
  const std::vector<ResultRow> rows{row()};
  const std::string text = results_csv(rows);
  for (std::size_t length = 0; length < text.size(); ++length) {
    const std::string cut = text.substr(0, length);
    const bool read = refusal(cut).empty();
    // A truncated file can be read only in these cases: it ends after the header; it ends where the
    // header of older versions ended; or it ends directly before or in the last number.
    CHECK(read == (length == kHeader.find(",tiers") || length + 1 == kHeader.size() ||
                   length == kHeader.size() || text.rfind(',') < length));
  }
}

TEST_CASE("comma-separated values follow RFC 4180") {
  CHECK(csv_field("plain") == "plain");
  CHECK(csv_field("a,b") == "\"a,b\"");
  CHECK(csv_field("say \"a\"") == "\"say \"\"a\"\"\"");
  CsvReader reader("a,\"b\nc\"\"d\",\r\n\n\"\",x");
  using Fields = std::vector<std::string>;
  CHECK(reader.next() == Fields{"a", "b\nc\"d", ""});
  CHECK(reader.line() == 1);
  CHECK(reader.next() == Fields{""});
  CHECK(reader.line() == 3);
  CHECK(reader.next() == Fields{"", "x"});
  CHECK_FALSE(reader.next());
}
