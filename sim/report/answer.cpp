#include "sim/report/answer.hpp"

#include <fmt/format.h>

#include <cctype>
#include <cmath>

#include "sim/report/html.hpp"

namespace kvlab {
namespace {

std::string strong(std::string_view label) {
  return fmt::format("<strong>{}</strong>", escape(label));
}

std::vector<std::string> tied_names(const Figures& figures,
                                    const std::vector<Standing>& standings) {
  std::vector<std::string> names;
  for (const Standing& standing : standings)
    if (standing.ties) names.push_back(strong(figures.series()[standing.series].label));
  return names;
}

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
                     is_tie(*difference) ? " (not told apart)" : "");
}

/// "It closes 83% of the gap between window and oracle_mass." Empty where there is no clear gap.
std::string gap_sentence(const Figures& figures, std::size_t best, std::string_view budget,
                         const MetricInfo& metric) {
  const auto window = counterpart(figures, best, "window"),
             oracle = counterpart(figures, best, kOracleMass);
  if (!window || !oracle || *window == best) return "";
  const auto gap = figures.difference(*window, *oracle, budget, metric.name);
  const auto gained = figures.difference(*window, best, budget, metric.name);
  if (!gap || !gained || is_tie(*gap) || is_tie(*gained)) return "";
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

/// How often the best of this budget is best elsewhere.
std::string elsewhere_sentence(const Figures& figures, std::size_t best, const MetricInfo& metric) {
  std::size_t alone = 0, tied = 0;
  for (const BudgetColumn& budget : figures.budgets()) {
    const auto standings = rank_policies(figures, budget.text, metric);
    std::size_t ties = 0;
    bool with_best = false;
    for (const Standing& standing : standings) {
      ties += standing.ties;
      with_best = with_best || (standing.ties && standing.series == best);
    }
    alone += with_best && ties == 1;
    tied += with_best && ties > 1;
  }
  const std::size_t budgets = figures.budgets().size();
  if (budgets < 2) return "";
  if (alone == budgets) return " It is best alone at every budget of the run.";
  if (alone + tied == budgets) return " It is among the best at every budget of the run.";
  return fmt::format(" Over the run's {} budgets {} is best alone at {} and ties for best at {}.",
                     budgets, escape(figures.series()[best].label), alone, tied);
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
                        const MetricInfo& metric) {
  const auto standings = rank_policies(figures, budget.text, metric);
  if (standings.empty())
    return "This run holds no policy to rank: only references and the full cache.";
  const std::size_t best = standings.front().series;
  const std::vector<std::string> tied = tied_names(figures, standings);
  std::string text = fmt::format("At a budget of {}{}, ", escape(budget.text),
                                 budget.text.ends_with('%') ? "" : " tokens");
  if (standings.size() == 1)
    text += strong(figures.series()[best].label) + " stands alone";
  else if (tied.size() == 1)
    text += strong(figures.series()[best].label) + " loses least";
  else
    text += join_names(tied) + " tie: none is apart by more than twice the error of the difference";
  std::string label(metric.label);
  label[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(label[0])));
  text += fmt::format(". {}{} is {}", escape(label),
                      tied.size() > 1 ? " of " + escape(figures.series()[best].label) : "",
                      score_text(standings.front().score));
  std::vector<std::string> others;
  for (const std::string_view policy : {std::string_view("window"), kOracleMass})
    if (auto other = against(figures, best, budget.text, metric, policy); !other.empty())
      others.push_back(std::move(other));
  if (!others.empty()) text += ", against " + join_names(others);
  return text + "." + gap_sentence(figures, best, budget.text, metric) +
         elsewhere_sentence(figures, best, metric);
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
    const auto standings = rank_policies(figures, budget.text, metric);
    if (standings.empty()) continue;
    const std::size_t best = standings.front().series;
    std::vector<std::string> ties;
    for (std::size_t i = 1; i < standings.size(); ++i)
      if (standings[i].ties) ties.push_back(escape(figures.series()[standings[i].series].label));
    rows.push_back(
        {escape(budget.text), series_html(figures, styles, best),
         average_cell(standings.front().score), folded(ties),
         score_cell(figures, counterpart(figures, best, "window"), budget.text, metric),
         score_cell(figures, counterpart(figures, best, kOracleMass), budget.text, metric)});
  }
  return table({{"budget"},
                {"best", false},
                {escape(metric.label)},
                {"ties with", false, true},
                {"window"},
                {"oracle_mass"}},
               rows, caption);
}

}  // namespace kvlab
