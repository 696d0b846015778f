#include "engine/evaluation/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "policies/catalogue.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

struct Request {
  std::vector<std::string> runs;
  std::string out, metric;
  bool json = false;
};

void add_options(OptionTable& table, Request& request) {
  table.texts("run", "RUN", Takes::one_word, request.runs, "");
  table.text("out", "FILE", request.out,
             "write the comparison as a page to this file; an existing file is replaced");
  table.text("metric", "M", request.metric,
             "metric to compare by (default: the metric that `kvlab deploy` chooses by)");
  add_json_option(table, request.json);
}

void print_table(const Comparison& comparison) {
  std::size_t width = 16, run_width = 18;
  for (const ComparedRow& row : comparison.rows)
    width = std::max(width, brief_policy(row.policy).size());
  const bool paired = std::ranges::any_of(
      comparison.rows, [](const ComparedRow& row) { return row.difference.has_value(); });
  for (const std::string& name : comparison.names) run_width = std::max(run_width, name.size());
  std::string group;
  for (const ComparedRow& row : comparison.rows) {
    if (group != row.group) {
      group = row.group;
      fmt::print("{}{}: {}\n{:<{}} {:>7}", &row == comparison.rows.data() ? "" : "\n", group,
                 comparison.metric, "policy", width, "budget");
      for (const std::string& name : comparison.names) fmt::print(" {:>{}}", name, run_width);
      fmt::print("{}\n", paired ? fmt::format("   {} - {} (95% CI)", comparison.names.back(),
                                              comparison.names.front())
                                : "");
    }
    fmt::print("{:<{}} {:>7}", brief_policy(row.policy), width, row.budget);
    // "±" has two bytes in UTF-8, but takes one column on the terminal.
    for (const auto& score : row.scores) {
      const std::string text = score ? average_text(*score) : "-";
      const std::size_t wide = text.find("±") == std::string::npos ? 0 : 1;
      fmt::print(" {:>{}}", text, run_width + wide);
    }
    fmt::print("{}\n", paired ? "   " + compared_text(row) : "");
  }
  if (!paired && std::ranges::any_of(comparison.rows, &ComparedRow::is_in_first_and_last))
    fmt::print(
        "The runs scored nothing in common, so differences cannot be paired and are not shown.\n");
  else if (!paired && !comparison.rows.empty())
    fmt::print("No configuration is in both {} and {}, so no differences are shown.\n",
               comparison.names.front(), comparison.names.back());
  const auto is_policy = [](const ComparedRow& row) { return row.policy != "full"; };
  const auto evicts = [](const ComparedRow& row) { return row.budget != "all"; };
  if (std::ranges::any_of(comparison.rows, is_policy)) {
    if (std::ranges::none_of(comparison.rows, evicts)) fmt::print("{}\n", kBudgetKeepsAll);
  } else {
    fmt::print(
        "No policy has the same settings and budget in two of the runs, so there are no pairs to "
        "compare. --out puts all of them on one page; to compare policies, replay them in one "
        "run.\n");
  }
}

int run(const Request& request) {
  std::vector<ScoreSet> sets;
  for (const std::string& folder : request.runs) sets.push_back(load_scores(folder));
  const std::string& out = request.out;
  std::optional<OutputClaim> claim;
  if (!out.empty()) {
    refuse_unwritable(out, "--out");
    claim.emplace(out);
  }
  const Comparison comparison = compare(std::move(sets), request.metric);
  if (!comparison.warning.empty()) fmt::print(stderr, "kvlab compare: {}\n", comparison.warning);
  if (!out.empty()) {
    if (!vega_script()) fmt::print(stderr, "kvlab compare: {}\n", kNoVega);
    write_file_atomically(out, page_html(compare_page(comparison)));
  }
  if (request.json) {
    print_json(comparison_json(comparison));
    return 0;
  }
  print_table(comparison);
  for (std::size_t i = 0; i < comparison.names.size(); ++i)
    if (!comparison.recommendations[i].empty())
      fmt::print("\n{}\n{}", comparison.names[i],
                 recommendations_text(comparison.recommendations[i]));
  if (!out.empty()) fmt::print("{}: open it in any browser\n", out);
  return 0;
}

}  // namespace

Command compare_command() {
  return {.name = "compare",
          .summary = "compares runs, evaluations or tasks; never averages over models",
          .usage = "RUN RUN... [--metric M] [--out page.html]",
          .example = "kvlab compare run other-run --out compare.html",
          .positional = "run",
          .prepare = make_prepare<Request>(add_options, nullptr, run)};
}

}  // namespace kvlab
