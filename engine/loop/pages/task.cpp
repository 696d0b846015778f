#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/loop/pages/pages.hpp"
#include "engine/loop/pages/scores.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/verdict.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

constexpr const char* kTaskFootnote =
    "An answer is right if it is exactly what was hidden. Shares have 95% intervals. Two are told "
    "apart by the draws that only one of them answers right, in an exact test.";
constexpr const char* kTaskMeanings =
    "<dt>right answers</dt><dd>the share of questions that the model answers word for word</dd>\n"
    "<dt>log-likelihood</dt><dd>what the model gives the right answer, mean of the draws, "
    "nats</dd>\n"
    "<dt>lost, gained</dt><dd>beside the first configuration, over the same questions</dd>\n"
    "<dt>query-agnostic</dt><dd>the question comes after the eviction; query-aware: before</dd>\n";

/// The verdict of the first group at each budget.
std::string answer_of(const ScoreSet& set) {
  const Figures figures(set.groups.front().rows);
  std::string text;
  for (const BudgetColumn& budget : figures.budgets()) {
    Ranking ranking = rank_policies(figures, budget.text, set.metrics.front());
    if (ranking.empty()) continue;
    ranking.scope.draws =
        figures
            .rows(ranking.standings[ranking.winner].series, budget.text, set.metrics.front().name)
            .front()
            ->count;
    const Average& score = ranking.standings[ranking.winner].score;
    if (!text.empty()) text += "<br>";
    text += escape(verdict_text(ranking.verdict, ranking.contenders, ranking.scope));
    text += fmt::format(" Right answers: {}.", average_text(score));
  }
  return text.empty() ? "Nothing here evicts: there is nothing to compare." : text;
}

}  // namespace

std::string task_page(const std::filesystem::path& folder) {
  const ScoreSet set = load_scores(folder);
  const std::string file = (folder / kTaskJson).string();
  const nlohmann::json top = parse_json(read_text_file(file, std::size_t{256} << 20), file);
  const JsonFields fields(top, file);
  const std::string title = "Does " + fields.text("model") + " still answer under evictions?";
  const Explorer explorer = explorer_of(set, "What each budget costs");
  const std::string context =
      fmt::format("{}, {} draws at each of {} depths and {} lengths. Choose one of them below.",
                  escape(fields.text("task")), fields.whole("draws"), fields.list("depths").size(),
                  fields.list("words").size());
  return html_page(
      "kvlab: " + title,
      html_header("kvlab task", escape(title), context, answer_of(set), "blue", kTaskFootnote) +
          explorer.sections +
          html_section("What the figures mean", "",
                       fmt::format("<dl class=\"prose\">{}</dl>\n", kTaskMeanings)) +
          html_section(
              "Where this comes from", "",
              html_terms({{"weights", "<code>" + escape(fields.text("weights_xxh3")) + "</code>"},
                          {"seed", std::to_string(fields.whole("seed"))},
                          {"kvlab", escape(fields.text("kvlab"))}})),
      explorer.data);
}

}  // namespace kvlab
