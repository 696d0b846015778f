#include <fmt/format.h>

#include "engine/loop/eval/score.hpp"
#include "engine/loop/pages/pages.hpp"
#include "engine/loop/pages/scores.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMostEvalBytes = std::size_t{256} << 20;
constexpr const char* kEvalFootnote =
    "Closed loop, teacher-forced: evictions change what later layers see. Two policies are told "
    "apart where the 95% interval of their paired difference, over texts or over the blocks of one "
    "text, leaves out zero.";
constexpr const char* kEvalMeanings =
    "<dt>KL</dt><dd>how far the next token’s distribution moves from the full cache’s, nats; mean, "
    "and percentiles over the tokens</dd>\n"
    "<dt>perplexity</dt><dd>exp of the mean −ln p of the text’s own next token</dd>\n"
    "<dt>top-1</dt><dd>tokens whose likeliest successor is the full cache’s</dd>\n";

class EvalPage {
 public:
  /// `budgets`: in their order.
  EvalPage(const json& top, const std::string& file, std::vector<std::string> budgets)
      : fields_(top, file), budgets_(std::move(budgets)) {}

  std::string html(const Explorer& explorer) const {
    const std::string title = "What do evictions cost " + fields_.text("model") + "?";
    return html_page(
        "kvlab: " + title,
        html_header("kvlab eval", escape(title), context(), answer(), "blue", kEvalFootnote) +
            explorer.sections + standings() + all_figures() +
            html_section("What the figures mean", "",
                         fmt::format("<dl class=\"prose\">{}</dl>\n", kEvalMeanings)) +
            provenance(),
        explorer.data);
  }

 private:
  std::vector<std::string> texts() const {
    std::vector<std::string> names;
    for (const json& name : fields_.list("texts"))
      names.push_back(name.is_string() ? name.get<std::string>() : "?");
    return names;
  }

  std::string context() const {
    return fmt::format("{} configurations over {} scored tokens of {}, beside the full cache.",
                       fields_.list("configurations").size(), fields_.whole("tokens"),
                       escape(join_names(texts())));
  }

  /// The verdict at each budget, and what to be wary of.
  std::string answer() const {
    if (!fields_.has("verdicts"))
      return "This evaluation is older than verdicts about equal memory; evaluate again.";
    std::string text;
    const JsonFields verdicts = fields_.object("verdicts");
    for (const auto& [budget, verdict] : verdicts.json().items())
      text += (text.empty() ? "" : "<br>") + escape(verdicts.object(budget).text("text"));
    for (const json& warning : fields_.list("warnings"))
      text += "<br>Note: " + escape(warning.is_string() ? warning.get<std::string>() : "?") + ".";
    return text.empty() ? "Nothing here evicts: there is nothing to compare." : text;
  }

  std::string standings() const {
    std::string html;
    const JsonFields contenders = fields_.object("contenders");
    for (const std::string& budget : budgets_) {
      if (!contenders.has(budget)) continue;
      std::vector<std::vector<Cell>> rows;
      for (const JsonFields& contender : contenders.objects(budget)) {
        const JsonFields behind = contender.object("behind");
        const bool first = rows.empty();
        rows.push_back({escape(brief_policy(contender.text("policy"))),
                        first ? Cell("first") : figure_cell(behind.number_or_nan("mean")),
                        first ? Cell("") : figure_cell(behind.number_or_nan("low")),
                        first ? Cell("") : figure_cell(behind.number_or_nan("high")),
                        first                                 ? ""
                        : contender.flag("holds_more", false) ? "holds more than the budget"
                        : behind.flag("told_apart", false)    ? "behind"
                                                              : "cannot be told apart",
                        bytes_cell(contender.number_or_nan("kv_bytes_mean")),
                        bytes_cell(contender.number_or_nan("kv_bytes_peak"))});
      }
      html += table({{"policy", false},
                     {"behind the first, nats"},
                     {"95% from"},
                     {"to"},
                     {"", false},
                     {"mean KV"},
                     {"peak KV"}},
                    rows, "budget " + escape(budget));
    }
    return html_section("Who is ahead",
                        "Paired over the same tokens, by KL (by −ln p where the full cache was "
                        "left out).",
                        html);
  }

  std::string all_figures() const {
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : fields_.objects("configurations")) {
      const auto cell = [&](std::string_view key) { return figure_cell(one.number_or_nan(key)); };
      rows.push_back(
          {escape(brief_policy(one.text("policy") + (one.text("params").empty() ? "" : ":") +
                               one.text("params"))),
           escape(one.text("budget")), escape(one.text("positions")), cell("perplexity"),
           cell("kl"), cell("kl_p50"), cell("kl_p90"), cell("kl_p99"), cell("kl_deviation"),
           cell("top1_agreement"), bytes_cell(one.number_or_nan("kv_bytes_mean")),
           bytes_cell(one.number("kv_bytes_peak"))});
    }
    return html_section("All figures", "",
                        table({{"policy", false},
                               {"budget"},
                               {"positions", false},
                               {"perplexity"},
                               {"KL"},
                               {"median"},
                               {"90%"},
                               {"99%"},
                               {"between texts"},
                               {"top-1"},
                               {"mean KV"},
                               {"peak KV"}},
                              rows));
  }

  std::string provenance() const {
    return html_section(
        "Where this comes from", "",
        html_terms({{"weights", "<code>" + escape(fields_.text("weights_xxh3")) + "</code>"},
                    {"texts", escape(join_names(texts()))},
                    {"queries", escape(fields_.text("span"))},
                    {"kvlab", escape(fields_.text("kvlab"))}}));
  }

  JsonFields fields_;
  std::vector<std::string> budgets_;
};

}  // namespace

std::string eval_page(const std::filesystem::path& folder) {
  const std::string file = (folder / kEvalJson).string();
  const json top = parse_json(read_text_file(file, kMostEvalBytes), file);
  JsonFields(top, file).check_format(kEvalFormat);
  const ScoreSet scores = load_scores(folder);
  std::vector<std::string> budgets;
  const std::vector<ResultRow> rows = all_rows(scores);
  const Figures figures(rows);
  for (const BudgetColumn& budget : figures.budgets()) budgets.push_back(budget.text);
  return EvalPage(top, file, std::move(budgets))
      .html(explorer_of(scores, "What each budget costs"));
}

}  // namespace kvlab
