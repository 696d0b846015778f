#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/evaluation/pages/pages.hpp"
#include "engine/evaluation/pages/scores.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

constexpr const char* kTaskFootnote =
    "An answer is right if it is exactly the hidden text. Two shares are compared by an exact test "
    "over the samples that only one of the two policies answers right.";
constexpr const char* kTaskMeanings =
    "<dt>right answers</dt><dd>the share of questions that the model answers word for word</dd>\n"
    "<dt>log-likelihood</dt><dd>log-likelihood of the right answer, mean over the samples, in "
    "nats</dd>\n"
    "<dt>lost, gained</dt><dd>compared with the first configuration, over the same questions</dd>\n"
    "<dt>query-agnostic</dt><dd>the question comes after the eviction; query-aware: before</dd>\n";

std::string next_of(std::span<const Recommendation> made) {
  const Recommendation& one = made[decisive_budget(made)];
  return fmt::format("kvlab eval --model DIR --text FILE... --policy {} --budget {}",
                     one.chosen_candidate().name, one.scope.budget);
}

/// The recommendations by the first group, which covers all lengths and depths.
std::string front_of(const ScoreSet& set) {
  const auto made = recommendations_for(set, set.metrics.front());
  return recommendations_html(made, made.empty() ? "" : next_of(made), colours_for(set)) +
         fmt::format("<p class=\"quiet prose\">{}</p>\n", kTaskFootnote);
}

}  // namespace

std::string task_page(const std::filesystem::path& folder) {
  const ScoreSet set = load_scores(folder);
  const std::string file = (folder / kTaskJson).string();
  const nlohmann::json top = parse_result_json(read_text_file(file, std::size_t{256} << 20), file);
  const JsonFields fields(top, file);
  const std::string title = "Does " + fields.text("model") + " still answer under evictions?";
  const Explorer explorer = explorer_of(set, "Right answers against budget");
  const std::string context =
      fmt::format("{}, {} samples at each of {} depths and {} lengths. Choose one of them below.",
                  escape(fields.text("task")), fields.whole("samples"),
                  fields.list("depths").size(), fields.list("words").size());
  return html_page(
      "kvlab: " + title,
      html_front("kvlab task", escape(title), context, front_of(set)) + explorer.sections +
          html_section("What the metrics mean", "",
                       fmt::format("<dl class=\"prose\">{}</dl>\n", kTaskMeanings)) +
          html_section(
              "Where this comes from", "",
              html_terms({{"weights", "<code>" + escape(fields.text("weights_xxh3")) + "</code>"},
                          {"seed", std::to_string(fields.whole("seed"))},
                          {"kvlab", escape(fields.text("kvlab"))}})),
      explorer.data);
}

}  // namespace kvlab
