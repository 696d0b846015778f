#include "sim/report/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "sim/report/html.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMostNamed = 4;

class Words {
 public:
  Words(const Verdict& verdict, std::span<const Contender> contenders, const VerdictScope& scope)
      : verdict_(verdict), contenders_(contenders), scope_(scope) {}

  std::string text() const {
    const std::string winner = name(verdict_.winner());
    std::string text = "At " + scope_.budget + held(verdict_.winner()) + ", ";
    if (verdict_.order.size() == 1)
      text += winner + " stands alone.";
    else if (verdict_.tied.size() > 1)
      text += fmt::format("{} cannot be told apart in {}; {} is the first of the grid.",
                          names(verdict_.tied), scope_.figure, winner);
    else if (alone())
      text += fmt::format("{} has the least loss in {}, told apart from all others.", winner,
                          scope_.figure);
    else
      text += fmt::format("{} cannot be told apart in {} from {}, and is preferred: {}.", winner,
                          scope_.figure, names(others()), why());
    return text + state() + more() + on();
  }

 private:
  std::string name(std::size_t c) const { return contenders_[c].name; }
  std::string names(const std::vector<std::size_t>& which) const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < std::min(which.size(), kMostNamed); ++i)
      all.push_back(name(which[i]));
    if (which.size() > kMostNamed) all.push_back(fmt::format("{} more", which.size() - kMostNamed));
    return join_names(all);
  }

  /// Those that the first is not told apart from, less those that are named with the winner.
  std::vector<std::size_t> others() const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < verdict_.order.size(); ++i)
      if (!verdict_.behind[i].behind() && !verdict_.ties(verdict_.order[i]))
        found.push_back(verdict_.order[i]);
    return found;
  }
  bool alone() const { return others().empty(); }
  std::string why() const {
    const Memory& own = contenders_[verdict_.winner()].memory;
    const bool less = std::ranges::any_of(
        others(), [&](std::size_t c) { return !holds_no_more(contenders_[c].memory, own); });
    return less ? "it holds less" : "the others are a last resort";
  }

  std::string held(std::size_t c) const {
    const Memory& memory = contenders_[c].memory;
    if (!(memory.peak > 0)) return "";
    return fmt::format(" ({} of keys and values on average, {} at most)", bytes_text(memory.mean),
                       bytes_text(memory.peak));
  }

  /// Policy state, where it makes a difference.
  std::string state() const {
    const auto total = [&](std::size_t c) { return contenders_[c].memory.total(); };
    const std::size_t least = std::ranges::min(verdict_.order, {}, total), own = verdict_.winner();
    if (!(total(own) > kSameMemory * total(least))) return "";
    return fmt::format(" With policy state it takes {}, {} {}.", bytes_text(total(own)),
                       name(least), bytes_text(total(least)));
  }

  std::string more() const {
    if (verdict_.over_budget) return " All hold more than the budget.";
    std::string text;
    for (std::size_t i = 0; i < std::min(verdict_.more.size(), kMostNamed); ++i) {
      const std::size_t c = verdict_.more[i];
      const bool less = contenders_[c].error < contenders_[verdict_.winner()].error;
      text += fmt::format(
          " {} holds {:.3g} × the budget at most, {}.", name(c),
          contenders_[c].memory.peak / scope_.budget_bytes,
          less ? "with less loss: a point of its own, not a better one" : "and is no contender");
    }
    if (verdict_.more.size() > kMostNamed)
      text += fmt::format(" So do {} more.", verdict_.more.size() - kMostNamed);
    return text;
  }

  std::string on() const {
    std::string text = scope_.draws > 0    ? fmt::format(" On {} draws", scope_.draws)
                       : scope_.texts == 1 ? " On this text"
                                           : fmt::format(" On {} texts", scope_.texts);
    if (scope_.tokens > 0) text += fmt::format(", {} scored tokens", scope_.tokens);
    if (!scope_.unmeasured.empty()) text += "; " + scope_.unmeasured;
    return text + ".";
  }

  const Verdict& verdict_;
  std::span<const Contender> contenders_;
  const VerdictScope& scope_;
};

ordered_json names_json(const std::vector<std::size_t>& which,
                        std::span<const Contender> contenders) {
  auto names = ordered_json::array();
  for (const std::size_t c : which) names.push_back(contenders[c].name);
  return names;
}

}  // namespace

std::string verdict_text(const Verdict& verdict, std::span<const Contender> contenders,
                         const VerdictScope& scope) {
  return Words(verdict, contenders, scope).text();
}

std::vector<std::string> verdict_warnings(const Verdict& verdict,
                                          std::span<const Contender> contenders,
                                          const VerdictScope& scope) {
  std::vector<std::string> lines;
  if (scope.tokens > 0 && scope.tokens < kEnoughTokens)
    lines.push_back(
        fmt::format("{} scored tokens tell little apart; {} or more are better: a longer text, or "
                    "several",
                    scope.tokens, kEnoughTokens));
  const auto unknown = [](const Difference& behind) { return std::isnan(behind.interval.low); };
  if (verdict.order.size() > 1 && std::ranges::all_of(verdict.behind, unknown))
    lines.push_back(
        "no 95% interval is known, so no difference is significant: an interval takes two texts, "
        "or 8 blocks of one");
  if (std::ranges::all_of(contenders, [](const Contender& c) { return !(c.memory.peak > 0); }))
    lines.push_back("what is held at decoded queries is not known; run it again to compare memory");
  for (const std::string& name : scope.filled)
    lines.push_back(
        fmt::format("{} at {}: its guards are as large as the budget, so it is `window` with sinks",
                    name, scope.budget));
  return lines;
}

ordered_json difference_json(const Difference& difference) {
  return {{"mean", number_or_null(difference.mean)},
          {"low", number_or_null(difference.interval.low)},
          {"high", number_or_null(difference.interval.high)},
          {"told_apart", difference.told_apart()}};
}

ordered_json standings_json(const Ranking& ranking, const Figures& figures) {
  auto list = ordered_json::array();
  for (const Standing& standing : ranking.standings) {
    const Series& series = figures.series()[standing.series];
    list.push_back({{"policy", series.policy},
                    {"params", series.params},
                    {"positions", series.positions},
                    {"prefill", series.prefill},
                    {"mean", standing.score.mean},
                    {"stderr", number_or_null(standing.score.standard_error)},
                    {"behind_first", number_or_null(standing.behind.mean)},
                    {"behind", difference_json(standing.behind)},
                    {"ties_with_first", standing.ties},
                    {"holds_more", standing.holds_more},
                    {"kv_bytes_mean", standing.memory.mean},
                    {"kv_bytes_peak", standing.memory.peak},
                    {"state_bytes", standing.memory.state}});
  }
  return list;
}

ordered_json verdict_json(const Verdict& verdict, std::span<const Contender> contenders,
                          const VerdictScope& scope) {
  auto frontier = ordered_json::array();
  for (const std::size_t c : verdict.frontier)
    frontier.push_back({{"policy", contenders[c].name},
                        {"error", number_or_null(contenders[c].error)},
                        {"kv_bytes_mean", contenders[c].memory.mean},
                        {"kv_bytes_peak", contenders[c].memory.peak},
                        {"state_bytes", contenders[c].memory.state}});
  return {{"text", verdict_text(verdict, contenders, scope)},
          {"winner", contenders[verdict.winner()].name},
          {"ties", names_json(verdict.tied, contenders)},
          {"holds_more", names_json(verdict.more, contenders)},
          {"frontier", std::move(frontier)},
          {"budget_bytes", scope.budget_bytes},
          {"figure", scope.figure},
          {"texts", scope.texts},
          {"tokens", scope.tokens},
          {"unmeasured", scope.unmeasured},
          {"warnings", verdict_warnings(verdict, contenders, scope)}};
}

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
