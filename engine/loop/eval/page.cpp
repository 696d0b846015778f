#include "engine/loop/eval/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/loop/eval/table.hpp"
#include "engine/loop/pages/scores.hpp"
#include "sim/report/charts.hpp"
#include "sim/report/html.hpp"
#include "sim/report/interactive/vega.hpp"
#include "sim/report/page.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = std::size_t{256} << 20;
constexpr std::string_view kAllTexts = "all";
constexpr MetricInfo kKl{"kl", "KL, nats", false, true};
constexpr MetricInfo kTail{"kl_p99", "KL, 99th percentile", false, true};
constexpr MetricInfo kNll{"nll", "−ln p of the text", false, true};

constexpr const char* kFootnote =
    "Closed loop, teacher-forced: evictions change what later layers see. Two policies are told "
    "apart where the 95% interval of their paired difference, over texts or over the blocks of one "
    "text, leaves out zero.";
constexpr const char* kMeanings =
    "<dt>KL</dt><dd>how far the next token’s distribution moves from the full cache’s, nats; mean, "
    "and percentiles over the tokens</dd>\n"
    "<dt>perplexity</dt><dd>exp of the mean −ln p of the text’s own next token</dd>\n"
    "<dt>top-1</dt><dd>tokens whose likeliest successor is the full cache’s</dd>\n";

double number(const JsonFields& fields, std::string_view key) {
  return fields.has(key) ? fields.number(key) : std::numeric_limits<double>::quiet_NaN();
}

std::string figure(double value) { return std::isnan(value) ? "–" : figure_text(value); }

class EvalPage {
 public:
  EvalPage(const json& top, const std::string& file, std::vector<ResultRow> rows)
      : fields_(top, file) {
    for (ResultRow& row : rows) (row.trace == kAllTexts ? over_all_ : by_text_).push_back(row);
  }

  /// `explorer`: the curves, where there is Vega.
  std::string html(const std::optional<Explorer>& explorer) const {
    const std::string title = "What do evictions cost " + fields_.text("model") + "?";
    return html_page(
        "kvlab: " + title,
        html_header("kvlab eval", escape(title), context(), answer(), "blue", kFootnote) +
            (explorer ? explorer->sections : curves()) + standings() + all_figures() +
            html_section("What the figures mean", "",
                         fmt::format("<dl class=\"prose\">{}</dl>\n", kMeanings)) +
            provenance(),
        explorer ? explorer->scripts : "");
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
    for (const auto& [budget, verdict] : verdicts.json().items()) {
      const JsonFields one(verdict, verdicts.where() + ": " + budget);
      text += (text.empty() ? "" : "<br>") + escape(one.text("text"));
    }
    for (const json& warning : fields_.list("warnings"))
      text += "<br>Note: " + escape(warning.is_string() ? warning.get<std::string>() : "?") + ".";
    return text.empty() ? "Nothing here evicts: there is nothing to compare." : text;
  }

  static std::string curve(const std::vector<ResultRow>& rows, const MetricInfo& metric,
                           std::string_view heading, std::string_view note) {
    const Figures figures(rows);
    if (figures.budgets().empty()) return "";
    std::vector<std::size_t> drawn;
    for (std::size_t s = 0; s < figures.series().size(); ++s)
      if (!figures.series()[s].is_full()) drawn.push_back(s);
    const std::string svg = curve_chart(figures, styles_of(figures.series()), drawn, metric,
                                        fmt::format("curve_{}", metric.name));
    return svg.empty() ? "" : html_figure(heading, note, svg);
  }

  std::string curves() const {
    return html_section(
        "What each budget costs", "",
        curve(by_text_, kKl, "KL to the full cache, lower is better",
              "Mean over tokens. Bars: one standard error of the mean over texts.") +
            curve(over_all_, kTail, "The worst hundredth",
                  "One token in a hundred moves by more than this.") +
            curve(by_text_, kNll, "−ln p of the text, lower is better",
                  "The logarithm of perplexity."),
        "figures");
  }

  std::string standings() const {
    std::string html;
    const JsonFields contenders = fields_.object("contenders");
    for (const auto& [budget, list] : contenders.json().items()) {
      std::vector<std::vector<std::string>> rows;
      for (const json& entry : contenders.list(budget)) {
        const JsonFields contender(entry, contenders.where() + ": " + budget);
        const JsonFields behind = contender.object("behind");
        const bool first = rows.empty();
        rows.push_back(
            {escape(contender.text("policy")), first ? "first" : figure(number(behind, "mean")),
             first ? "" : figure(number(behind, "low")) + " to " + figure(number(behind, "high")),
             first                                 ? ""
             : contender.flag("holds_more", false) ? "holds more than the budget"
             : behind.flag("told_apart", false)    ? "behind"
                                                   : "cannot be told apart",
             bytes_text(number(contender, "kv_bytes_mean")),
             bytes_text(number(contender, "kv_bytes_peak"))});
      }
      html += table({{"policy", false},
                     {"behind the first, nats"},
                     {"95%"},
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
    std::vector<std::vector<std::string>> rows;
    for (const json& entry : fields_.list("configurations")) {
      const JsonFields one(entry, fields_.where() + ": configurations");
      const auto cell = [&](std::string_view key) { return figure(number(one, key)); };
      rows.push_back({escape(one.text("policy") + (one.text("params").empty() ? "" : ":") +
                             one.text("params")),
                      escape(one.text("budget")), escape(one.text("positions")), cell("perplexity"),
                      cell("kl"), cell("kl_p50"), cell("kl_p90"), cell("kl_p99"),
                      cell("kl_deviation"), cell("top1_agreement"),
                      bytes_text(number(one, "kv_bytes_mean")),
                      bytes_text(one.number("kv_bytes_peak"))});
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
  std::vector<ResultRow> by_text_, over_all_;
};

}  // namespace

std::string eval_page(const std::filesystem::path& folder, bool fixed) {
  const std::string file = (folder / kEvalJson).string(), csv = (folder / kEvalCsv).string();
  const json top = parse_json(read_text_file(file, kMaxBytes), file);
  JsonFields(top, file).check_format(kEvalFormat);
  std::optional<Explorer> explorer;
  if (const auto vega = fixed ? std::nullopt : vega_script())
    explorer = explorer_of(load_scores(folder), "What each budget costs", *vega);
  return EvalPage(top, file, parse_score_rows(read_text_file(csv, kMaxBytes), csv)).html(explorer);
}

}  // namespace kvlab
