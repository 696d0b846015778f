#include "sim/report/answer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "sim/report/html.hpp"
#include "sim/report/verdict.hpp"

namespace kvlab {
namespace {

/// "a, b and c"; of more than four, the first and a number that opens the rest.
std::string folded(const std::vector<std::string>& names) {
  if (names.size() <= 4) return names.empty() ? "–" : join_names(names);
  return fmt::format("<details><summary>{} and {} others</summary>{}</details>", names.front(),
                     names.size() - 1, join_names(names));
}

/// A score that no line breaks.
std::string score_text(const Average& score) {
  std::string text = average_text(score);
  if (const auto at = text.find(" ± "); at != std::string::npos)
    text.replace(at, std::string_view(" ± ").size(), "&nbsp;±&nbsp;");
  return text;
}

/// "against 0.81 ± 0.02 for window": how the best stands to another series at this budget.
std::string against(const Figures& figures, std::size_t best, std::string_view budget,
                    const MetricInfo& metric, std::string_view policy) {
  const auto other = counterpart(figures, best, policy);
  if (!other || *other == best) return "";
  const auto score = figures.average(*other, budget, metric.name);
  const auto difference = figures.difference(best, *other, budget, metric.name);
  if (!score || !difference) return "";
  return fmt::format("{} for {}{}", score_text(*score), escape(figures.series()[*other].label),
                     difference->told_apart() ? "" : " (not told apart)");
}

/// "It closes 83% of the gap between window and oracle_mass." Empty where there is no clear gap.
std::string gap_sentence(const Figures& figures, std::size_t best, std::string_view budget,
                         const MetricInfo& metric) {
  const auto window = counterpart(figures, best, "window"),
             oracle = counterpart(figures, best, kOracleMass);
  if (!window || !oracle || *window == best) return "";
  const auto gap = figures.difference(*window, *oracle, budget, metric.name);
  const auto gained = figures.difference(*window, best, budget, metric.name);
  if (!gap || !gained || !gap->told_apart() || !gained->told_apart()) return "";
  const double share = gained->mean / gap->mean;
  if (!(share > 0)) return "";
  if (share > 1)
    return fmt::format(
        " That is less than {}'s, which evicts by future attention and not by this figure.",
        escape(figures.series()[*oracle].label));
  return fmt::format(" That closes {:.0f}% of the gap between {} and {}.", 100 * share,
                     escape(figures.series()[*window].label),
                     escape(figures.series()[*oracle].label));
}

/// At how many budgets the winner of this one is named.
std::string elsewhere_sentence(const Figures& figures, std::size_t winner,
                               const MetricInfo& metric) {
  std::size_t alone = 0, tied = 0;
  for (const BudgetColumn& budget : figures.budgets()) {
    const Ranking ranking = rank_policies(figures, budget.text, metric);
    const auto own = std::ranges::find(ranking.series, winner) - ranking.series.begin();
    if (ranking.empty() || !ranking.verdict.ties(static_cast<std::size_t>(own))) continue;
    ++(ranking.verdict.tied.size() == 1 ? alone : tied);
  }
  if (figures.budgets().size() < 2) return "";
  return fmt::format(
      " Of the run’s {} budgets it is first alone at {}, and not told apart from "
      "the first at {}.",
      figures.budgets().size(), alone, tied);
}

Cell score_cell(const Figures& figures, std::optional<std::size_t> series, std::string_view budget,
                const MetricInfo& metric) {
  const auto score = series ? figures.average(*series, budget, metric.name) : std::nullopt;
  return score ? average_cell(*score) : Cell("–");
}

}  // namespace

std::optional<std::size_t> counterpart(const Figures& figures, std::size_t series,
                                       std::string_view policy) {
  const Series& like = figures.series()[series];
  std::optional<std::size_t> found;
  for (std::size_t s = 0; s < figures.series().size(); ++s) {
    const Series& other = figures.series()[s];
    if (other.policy != policy || other.prefill != like.prefill) continue;
    if (!found ||
        (figures.series()[*found].positions != like.positions && other.positions == like.positions))
      found = s;
  }
  return found;
}

std::string answer_html(const Figures& figures, const BudgetColumn& budget,
                        const MetricInfo& metric, std::uint64_t tokens) {
  Ranking ranking = rank_policies(figures, budget.text, metric);
  if (ranking.empty())
    return "This run holds no policy to rank: only references and the full cache.";
  ranking.scope.tokens = tokens;
  ranking.scope.unmeasured = "in the open loop; what the model then says was not asked";
  const Standing& winner = ranking.standings[ranking.winner];
  const std::string name = escape(figures.series()[winner.series].label);
  std::string text = escape(verdict_text(ranking.verdict, ranking.contenders, ranking.scope));
  if (const auto at = text.find(name); at != std::string::npos)
    text.replace(at, name.size(), "<strong>" + name + "</strong>");
  std::string label(metric.label);
  label[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(label[0])));
  text += fmt::format(" {} of {} is {}", escape(label), name, score_text(winner.score));
  std::vector<std::string> others;
  for (const std::string_view policy : {std::string_view("window"), kOracleMass})
    if (auto other = against(figures, winner.series, budget.text, metric, policy); !other.empty())
      others.push_back(std::move(other));
  if (!others.empty()) text += ", against " + join_names(others);
  text += "." + gap_sentence(figures, winner.series, budget.text, metric) +
          elsewhere_sentence(figures, winner.series, metric);
  for (const std::string& warning :
       verdict_warnings(ranking.verdict, ranking.contenders, ranking.scope))
    text += "<br>Note: " + escape(warning) + ".";
  return text;
}

std::string series_html(const Figures& figures, const std::vector<SeriesStyle>& styles,
                        std::size_t series) {
  return fmt::format("<span class=\"dot\" style=\"background:var(--{})\"></span>{}",
                     styles[series].colour, escape(figures.series()[series].label));
}

std::string best_by_budget_html(const Figures& figures, const std::vector<SeriesStyle>& styles,
                                const MetricInfo& metric, const std::string& caption) {
  std::vector<std::vector<Cell>> rows;
  for (const BudgetColumn& budget : figures.budgets()) {
    const Ranking ranking = rank_policies(figures, budget.text, metric);
    if (ranking.empty()) continue;
    const Standing& winner = ranking.standings[ranking.winner];
    const std::size_t best = winner.series;
    std::vector<std::string> ties, more;
    for (const Standing& standing : ranking.standings)
      if (standing.series != best && (standing.ties || standing.holds_more))
        (standing.ties ? ties : more).push_back(escape(figures.series()[standing.series].label));
    rows.push_back(
        {escape(budget.text), series_html(figures, styles, best), average_cell(winner.score),
         folded(ties), folded(more),
         score_cell(figures, counterpart(figures, best, "window"), budget.text, metric),
         score_cell(figures, counterpart(figures, best, kOracleMass), budget.text, metric)});
  }
  return table({{"budget"},
                {"best", false},
                {escape(metric.label)},
                {"not told apart", false, true},
                {"holds more", false, true},
                {"window"},
                {"oracle_mass"}},
               rows, caption);
}

}  // namespace kvlab
