#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/pages/pages.hpp"
#include "engine/evaluation/pages/scores.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxEvalBytes = std::size_t{256} << 20;
constexpr const char* kEvalFootnote =
    "End-to-end evaluation with teacher forcing: evictions change what later layers see. A "
    "difference is significant if its 95% interval, paired over texts or over the blocks of one "
    "text, excludes zero.";
constexpr const char* kEvalMeanings =
    "<dt>KL</dt><dd>divergence of the next token’s distribution from the full cache’s, in nats; "
    "mean, and percentiles over the tokens</dd>\n"
    "<dt>perplexity</dt><dd>exp of the mean −ln p of the text’s own next token</dd>\n"
    "<dt>top-1</dt><dd>share of tokens at which the most likely next token is the same as with the "
    "full cache</dd>\n";

class EvalPage {
 public:
  EvalPage(const json& top, const std::string& file, const ScoreSet& scores)
      : fields_(top, file), scores_(scores) {}

  std::string html(const Explorer& explorer) const {
    const std::string title = "What do evictions cost " + fields_.text("model") + "?";
    return html_page("kvlab: " + title,
                     html_front("kvlab eval", escape(title), context(), front()) +
                         explorer.sections + candidates() + all_metrics_section() +
                         html_section("What the metrics mean", "",
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
    std::size_t evicting = 0, full = 0;
    for (const JsonFields& one : fields_.objects("configurations"))
      ++(one.text("policy") == "full" ? full : evicting);
    return fmt::format("{} {}{}, over {} scored tokens of {}.", evicting,
                       evicting == 1 ? "configuration" : "configurations",
                       full > 0 ? " and the full cache" : "", fields_.whole("tokens"),
                       escape(join_names(texts())));
  }

  /// The recommendations and warnings.
  std::string front() const {
    if (!fields_.has("recommendations"))
      return "<p class=\"answer\">This evaluation was made by an older kvlab and has no "
             "recommendations. Evaluate again.</p>\n";
    const auto& made = scores_.recommendations;
    std::string next;
    if (!made.empty()) {
      const Recommendation& decisive = made[decisive_budget(made)];
      next = fmt::format("kvlab generate --model DIR --prompt TEXT --policy {} --budget {}",
                         decisive.chosen_candidate().name, decisive.scope.budget);
    }
    std::string html = recommendations_html(made, next, colours_for(scores_));
    const std::vector<std::string> shown = recommendation_warnings(made);
    for (const json& warning : fields_.list("warnings"))
      if (const std::string text = warning.is_string() ? warning.get<std::string>() : "?";
          std::ranges::find(shown, text) == shown.end())
        html += fmt::format("<p class=\"quiet prose\">Note: {}.</p>\n", escape(text));
    return html + fmt::format("<p class=\"quiet prose\">{}</p>\n", kEvalFootnote);
  }

  static std::string significance(const Difference& difference) {
    if (std::isnan(difference.interval.low)) return "no interval known";
    return difference.significantly_different() ? "significant" : "not significant";
  }

  /// Every configuration at each budget, in the order of the recommendation.
  std::string candidates() const {
    std::string html;
    for (const Recommendation& made : scores_.recommendations) {
      std::vector<std::vector<Cell>> rows;
      const auto add = [&](std::size_t c, const Cell& mean, const Cell& low, const Cell& high,
                           const std::string& note) {
        const Candidate& own = made.candidates[c];
        rows.push_back({escape(own.name), number_cell(made.mean(c)), mean, low, high, note,
                        bytes_cell(own.memory.mean), bytes_cell(own.memory.peak)});
      };
      for (const std::size_t c : made.order) {
        const Difference& from = made.difference(c);
        if (c == made.choice)
          add(c, "", "", "", "chosen");
        else
          add(c, number_cell(from.mean), number_cell(from.interval.low),
              number_cell(from.interval.high), significance(from));
      }
      for (const std::size_t c : made.over_budget) add(c, "", "", "", "over budget");
      html += table({{"policy", false},
                     {escape(made.scope.metric)},
                     {"minus the choice, nats"},
                     {"95% from"},
                     {"to"},
                     {"", false},
                     {"mean KV"},
                     {"peak KV"}},
                    rows, "budget " + escape(made.scope.budget));
    }
    if (html.empty()) return "";
    return html_section("All policies at each budget",
                        "Differences are paired over the same tokens, by KL (by −ln p if the full "
                        "cache was left out).",
                        html);
  }

  std::string all_metrics_section() const {
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : fields_.objects("configurations")) {
      const auto cell = [&](std::string_view key) { return number_cell(one.number_or_nan(key)); };
      rows.push_back(
          {escape(brief_policy(one.text("policy") + (one.text("params").empty() ? "" : ":") +
                               one.text("params"))),
           escape(one.text("budget")), escape(one.text("positions")), cell("perplexity"),
           cell("kl"), cell("kl_p50"), cell("kl_p90"), cell("kl_p99"), cell("kl_deviation"),
           cell("top1_agreement"), bytes_cell(one.number_or_nan("kv_bytes_mean")),
           bytes_cell(one.number("kv_bytes_peak"))});
    }
    return html_section("All metrics", "",
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
                    {"queries", escape(fields_.text("queries"))},
                    {"kvlab", escape(fields_.text("kvlab"))}}));
  }

  JsonFields fields_;
  const ScoreSet& scores_;
};

}  // namespace

std::string eval_page(const std::filesystem::path& folder) {
  const std::string file = (folder / kEvalJson).string();
  const json top = parse_result_json(read_text_file(file, kMaxEvalBytes), file);
  JsonFields(top, file).check_format(kEvalFormat);
  const ScoreSet scores = load_scores(folder);
  return EvalPage(top, file, scores).html(explorer_of(scores, "Error against budget"));
}

}  // namespace kvlab
