#include "sim/report/recommendation.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "sim/report/text.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;
using Recommendations = std::span<const Recommendation>;

constexpr std::size_t kMaxNamed = 4;
constexpr std::size_t kColumns = 80;  // width of a terminal

const std::string& name(const Recommendation& made, std::size_t c) {
  return made.candidates[c].name;
}

/// "a, b, c, d and 3 more".
std::string names_of(const Recommendation& made, const std::vector<std::size_t>& which) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < std::min(which.size(), kMaxNamed); ++i)
    all.push_back(name(made, which[i]));
  if (which.size() > kMaxNamed) all.push_back(fmt::format("{} more", which.size() - kMaxNamed));
  return join_names(all);
}

bool is_known(const Difference& difference) { return std::isfinite(difference.interval.low); }

/// The memory of the choice: 97.0 KiB.
std::string memory_text(const Recommendation& made) {
  const Memory& memory = made.chosen_candidate().memory;
  return memory.mean > 0 ? bytes_text(memory.mean) : "–";
}
std::string full_share_text(const Recommendation& made) {
  const double mean = made.chosen_candidate().memory.mean;
  if (!(mean > 0) || !(made.scope.full_bytes > 0)) return "–";
  return fmt::format("{:.1f}%", 100 * mean / made.scope.full_bytes);
}

std::string lowest(const Recommendation& made) {
  return made.scope.higher_is_better ? "highest" : "lowest";
}

double less_memory(const Recommendation& made) {
  return 100 *
         (1 - made.chosen_candidate().memory.mean / made.candidates[*made.runner_up].memory.mean);
}

/// Says why the runner-up was not chosen, although its mean is better.
std::string memory_reason(const Recommendation& made) {
  return fmt::format(
      "{} has the {} mean ({}), but {} was chosen because it needs {:.1f}% less memory and the "
      "difference is not significant",
      name(made, *made.runner_up), lowest(made), number_text(made.mean(*made.runner_up)),
      made.chosen_candidate().name, less_memory(made));
}

/// "1 text, 399 scored tokens. Task accuracy was not measured."
std::string describe_scope(const ComparisonScope& scope) {
  std::string text = scope.samples > 0
                         ? fmt::format("{} samples", scope.samples)
                         : fmt::format("{} {}", scope.texts, scope.texts == 1 ? "text" : "texts");
  if (scope.tokens > 0) text += fmt::format(", {} scored tokens", scope.tokens);
  return text + "." + (scope.note.empty() ? "" : " " + scope.note);
}

/// A candidate's peak memory as a multiple of the budget's memory.
double times_budget(const Recommendation& made, std::size_t c) {
  return made.candidates[c].memory.peak / made.scope.budget_bytes;
}

/// "snapkv (1.7x to 9.8x)" for each candidate, over all budgets.
std::string over_budget_note(Recommendations all) {
  std::vector<std::string> order;
  std::map<std::string, std::pair<double, double>> times;
  for (const Recommendation& made : all)
    for (const std::size_t c : made.over_budget) {
      const double own = times_budget(made, c);
      const auto [at, added] = times.try_emplace(name(made, c), own, own);
      if (added) order.push_back(name(made, c));
      at->second = {std::min(at->second.first, own), std::max(at->second.second, own)};
    }
  if (order.empty()) return "";
  std::vector<std::string> parts;
  for (const std::string& own : order) {
    const auto [lowest_ratio, highest_ratio] = times.at(own);
    const std::string low = fmt::format("{:.2g}x", lowest_ratio),
                      high = fmt::format("{:.2g}x", highest_ratio);
    parts.push_back(fmt::format("{} ({})", own, low == high ? low : low + " to " + high));
  }
  return "These policies peak over budget and are not ranked: " + join_names(parts) + ".";
}

std::string similar_note(Recommendations all) {
  std::vector<std::string> parts;
  for (const Recommendation& made : all) {
    std::vector<std::size_t> similar = made.similar();
    std::erase_if(similar, [&](std::size_t c) { return !is_known(made.difference(c)); });
    if (!similar.empty())
      parts.push_back(fmt::format("{}: {}", made.scope.budget, names_of(made, similar)));
  }
  if (parts.empty()) return "";
  return fmt::format("Not significantly different from the choice (95% CI): {}.",
                     fmt::join(parts, "; "));
}

/// The number of decimals at which half the width of a difference's interval has two significant
/// digits.
int decimals_of(const Difference& difference) {
  const auto [low, high] = difference.interval;
  const double size =
      is_known(difference) && high > low ? (high - low) / 2 : std::abs(difference.mean);
  if (!(size > 0)) return 0;
  return static_cast<int>(std::clamp(1 - std::floor(std::log10(size)), 0.0, 8.0));
}

std::string decimal_text(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (text.starts_with('-') && text.find_first_not_of("-0.") == std::string::npos) text.erase(0, 1);
  return text;
}

/// `text`, shortened to at most `max_size` characters.
std::string cut(const std::string& text, std::size_t max_size) {
  return text.size() <= max_size ? text : text.substr(0, max_size - 1) + "…";
}

/// Whether choice and runner-up have equal means. Then the choice is the first of them by name.
bool is_equal(const Recommendation& made) {
  return made.runner_up && made.candidates[*made.runner_up].error == made.chosen_candidate().error;
}
std::string equal_reason(const Recommendation& made) {
  return fmt::format("{} and {} have equal means, and {} is the first by name",
                     made.chosen_candidate().name, name(made, *made.runner_up),
                     made.chosen_candidate().name);
}

std::string wrap_text(const std::string& text) {
  std::string out, line;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!line.empty() && line.size() + 1 + word.size() > kColumns)
      out += line + "\n", line = "  " + word;
    else
      line += (line.empty() ? "" : " ") + word;
    at = end + 1;
  }
  return out + line + "\n";
}

/// One row of the table, as text. `runner_up` and `difference` are empty if there is only one
/// policy.
struct Row {
  std::string budget, memory, full_share, choice, mean, runner_up, difference;
};

std::vector<Row> rows_of(Recommendations all) {
  std::vector<Row> rows;
  for (const Recommendation& made : all) {
    Row row{made.scope.budget,
            memory_text(made),
            full_share_text(made),
            made.chosen_candidate().name,
            number_text(made.mean(made.choice)),
            "–",
            ""};
    if (made.runner_up) {
      row.runner_up = name(made, *made.runner_up);
      row.difference = difference_text(made.difference(*made.runner_up), ", ");
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

/// A metric with a longer name is written above the table, because as a heading it would leave too
/// little space for the names of policies.
constexpr std::size_t kLongestHeading = 10;

std::string table_text(const std::vector<Row>& rows, const std::string& metric) {
  const auto width = [&](std::string Row::*part, std::size_t min_width) {
    for (const Row& row : rows) min_width = std::max(min_width, (row.*part).size());
    return min_width;
  };
  const bool above = metric.size() > kLongestHeading;
  const std::string mean = above ? "mean" : metric;
  const std::size_t budget = width(&Row::budget, 6), memory = width(&Row::memory, 6),
                    full_share = width(&Row::full_share, 7), means = width(&Row::mean, mean.size()),
                    difference = width(&Row::difference, 19);
  const std::size_t used = budget + memory + full_share + means + difference + 9;
  // The characters of a line that are left for the names of choice and runner-up.
  const std::size_t left = std::max<std::size_t>(kColumns, used + 18) - used;
  const std::size_t choices = width(&Row::choice, 6), runners = width(&Row::runner_up, 9);
  const std::size_t choice = std::min(choices, std::max(left / 2, left - std::min(left, runners))),
                    runner = std::min(runners, left - choice);
  std::string text = above ? "mean: " + metric + "\n" : "";
  const auto line = [&](const Row& row) {
    std::string own =
        fmt::format("{:<{}} {:>{}} {:>{}}  {:<{}} {:>{}}  {:<{}}  {}", row.budget, budget,
                    row.memory, memory, row.full_share, full_share, cut(row.choice, choice), choice,
                    row.mean, means, cut(row.runner_up, runner), runner, row.difference);
    own.erase(own.find_last_not_of(' ') + 1);
    text += own + "\n";
  };
  line({"budget", "memory", "of full", "choice", mean, "runner-up", "difference (95% CI)"});
  for (const Row& row : rows) line(row);
  return text;
}

}  // namespace

std::string difference_text(const Difference& difference, std::string_view to) {
  const int decimals = decimals_of(difference);
  const std::string mean = decimal_text(difference.mean, decimals);
  if (!is_known(difference)) return mean;
  return fmt::format("{} ({}{}{})", mean, decimal_text(difference.interval.low, decimals), to,
                     decimal_text(difference.interval.high, decimals));
}

std::string wrap_columns(const std::string& text) { return wrap_text(text); }

std::string recommendation_text(const Recommendation& made) {
  const std::string& choice = made.chosen_candidate().name;
  const std::string& metric = made.scope.metric;
  std::string text = "Budget " + made.scope.budget_text();
  if (made.chosen_candidate().memory.mean > 0) text += " (" + memory_text(made) + ")";
  text += ": ";
  if (made.none_eligible)
    text += fmt::format("no policy stays within the budget; {} peaks at {:.2g}x the budget. ",
                        choice, times_budget(made, made.choice));
  const std::string own =
      fmt::format("{} ({} {})", choice, metric, number_text(made.mean(made.choice)));
  if (!made.runner_up) {
    text += own + " is the only policy.";
  } else {
    const std::size_t other = *made.runner_up;
    const Difference& difference = made.difference(other);
    const std::string both =
        fmt::format("{} and {} ({})", own, name(made, other), number_text(made.mean(other)));
    const std::string interval =
        fmt::format("the difference is {}, 95% CI", difference_text(difference));
    if (!is_known(difference))
      text += both + ": no confidence interval of the difference is known.";
    else if (difference.significantly_different())
      text += fmt::format("{} differ significantly; {}.", both, interval);
    else
      text += fmt::format("{} do not differ significantly; {}.", both, interval);
    text += made.for_memory  ? " " + memory_reason(made) + "."
            : is_equal(made) ? " " + equal_reason(made) + "."
                             : fmt::format(" Chosen: {}, {} mean.", choice, lowest(made));
  }
  if (const std::string note = over_budget_note({&made, 1}); !note.empty()) text += " " + note;
  return text + " " + describe_scope(made.scope);
}

namespace {

/// The notes below a table. `similar`: whether they list the policies that are not significantly
/// different from the choice.
std::vector<std::string> notes_of(Recommendations made, bool similar) {
  std::vector<std::string> notes;
  const auto add = [&](std::string line) {
    if (!line.empty()) notes.push_back(std::move(line));
  };
  if (made.empty()) return notes;
  const ComparisonScope& scope = made.front().scope;
  add(
      fmt::format("Choice: {} mean of {} within the budget. Difference: how much worse the "
                  "runner-up is.",
                  lowest(made.front()), scope.metric));
  if (similar) add(similar_note(made));
  for (const Recommendation& one : made) {
    if (!one.for_memory && is_equal(one))
      add(fmt::format("{}: {}.", one.scope.budget, equal_reason(one)));
    if (one.for_memory) add(fmt::format("{}: {}.", one.scope.budget, memory_reason(one)));
    if (one.none_eligible)
      add(fmt::format("{}: no policy stays within the budget; {} peaks at {:.2g}x the budget.",
                      one.scope.budget, one.chosen_candidate().name,
                      times_budget(one, one.choice)));
  }
  add(over_budget_note(made));
  add((scope.full_bytes > 0 ? "Full cache: " + bytes_text(scope.full_bytes) + " on average. "
                            : "") +
      describe_scope(scope));
  return notes;
}

}  // namespace

std::vector<std::string> recommendation_notes(Recommendations made) { return notes_of(made, true); }

std::string recommendations_text(Recommendations made) {
  if (made.empty()) return "";
  std::string text = table_text(rows_of(made), made.front().scope.metric);
  for (const std::string& note : recommendation_notes(made)) text += wrap_text(note);
  return text;
}

std::string few_tokens_warning(std::uint64_t tokens) {
  if (tokens >= kEnoughTokens) return "";
  return fmt::format(
      "only {} scored, so confidence intervals are wide; use at least {} (a longer text, or "
      "several)",
      tokens == 1 ? "1 token was" : fmt::format("{} tokens were", tokens), kEnoughTokens);
}

std::vector<std::string> recommendation_warnings(const Recommendation& made) {
  std::vector<std::string> lines;
  const ComparisonScope& scope = made.scope;
  if (scope.tokens > 0 && scope.tokens < kEnoughTokens)
    lines.push_back(few_tokens_warning(scope.tokens));
  const auto unknown = [](const Difference& from_lowest) { return !is_known(from_lowest); };
  if (made.order.size() > 1 && std::ranges::all_of(made.from_lowest, unknown))
    lines.push_back(
        "no 95% interval is known, so no difference is significant; an interval needs two texts, "
        "or 8 blocks of one text");
  if (std::ranges::all_of(made.candidates, [](const Candidate& c) { return !(c.memory.peak > 0); }))
    lines.push_back(
        "the memory over decoded queries is not known; repeat the run to compare memory");
  for (const std::string& own : scope.filled)
    lines.push_back(fmt::format(
        "{} at {}: the protected tokens fill the budget, so the policy evicts as `window` with "
        "sinks does",
        own, scope.budget_text()));
  return lines;
}

std::vector<std::string> recommendation_warnings(Recommendations made) {
  std::vector<std::string> lines;
  for (const Recommendation& one : made)
    for (std::string& line : recommendation_warnings(one))
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
  return lines;
}

ordered_json difference_json(const Difference& difference) {
  return {{"mean", number_or_null(difference.mean)},
          {"low", number_or_null(difference.interval.low)},
          {"high", number_or_null(difference.interval.high)},
          {"significantly_different", difference.significantly_different()}};
}

ordered_json ranking_json(const Ranking& ranking, const MetricTable& metric_table) {
  auto list = ordered_json::array();
  for (const RankedPolicy& entry : ranking.ranked) {
    const Series& series = metric_table.series()[entry.series];
    list.push_back({{"policy", series.policy},
                    {"params", series.params},
                    {"positions", series.positions},
                    {"prefill", series.prefill},
                    {"mean", entry.score.mean},
                    {"stderr", number_or_null(entry.score.standard_error)},
                    {"behind_first", number_or_null(entry.from_lowest.mean)},
                    {"from_lowest", difference_json(entry.from_lowest)},
                    {"not_significantly_different", entry.is_similar},
                    {"over_budget", entry.over_budget},
                    {"kv_bytes_mean", entry.memory.mean},
                    {"kv_bytes_peak", entry.memory.peak},
                    {"state_bytes", entry.memory.state}});
  }
  return list;
}

namespace {

ordered_json significance_json(const Difference& difference) {
  return {{"mean", number_or_null(difference.mean)},
          {"low", number_or_null(difference.interval.low)},
          {"high", number_or_null(difference.interval.high)},
          {"significant", difference.significantly_different()}};
}

ordered_json candidate_json(const Recommendation& made, std::size_t c) {
  const Candidate& own = made.candidates[c];
  return {{"policy", own.name},
          {"mean", number_or_null(made.mean(c))},
          {"kv_bytes_mean", own.memory.mean},
          {"kv_bytes_peak", own.memory.peak},
          {"state_bytes", own.memory.state}};
}

ordered_json names_json(const Recommendation& made, const std::vector<std::size_t>& which) {
  auto names = ordered_json::array();
  for (const std::size_t c : which) names.push_back(name(made, c));
  return names;
}

std::string reason_of(const Recommendation& made) {
  if (!made.runner_up) return "only policy";
  if (is_equal(made)) return "equal means, first by name";
  return made.for_memory ? "less memory" : lowest(made) + " mean";
}

}  // namespace

ordered_json recommendation_json(const Recommendation& made) {
  const ComparisonScope& scope = made.scope;
  auto order = ordered_json::array(), over = ordered_json::array(), frontier = order;
  for (std::size_t i = 0; i < made.order.size(); ++i) {
    order.push_back(candidate_json(made, made.order[i]));
    order.back()["from_lowest"] = significance_json(made.from_lowest[i]);
    order.back()["from_choice"] = significance_json(made.from_choice[i]);
  }
  for (const std::size_t c : made.over_budget) over.push_back(candidate_json(made, c));
  for (const std::size_t c : made.frontier) frontier.push_back(candidate_json(made, c));
  return {{"budget", scope.budget},
          {"choice", made.chosen_candidate().name},
          {"reason", reason_of(made)},
          {"metric", scope.metric},
          {"better", scope.higher_is_better ? "higher" : "lower"},
          {"mean", number_or_null(made.mean(made.choice))},
          {"kv_bytes_mean", made.chosen_candidate().memory.mean},
          {"kv_bytes_peak", made.chosen_candidate().memory.peak},
          {"budget_bytes", scope.budget_bytes},
          {"full_bytes", scope.full_bytes},
          {"runner_up",
           made.runner_up ? ordered_json(name(made, *made.runner_up)) : ordered_json(nullptr)},
          {"difference", made.runner_up ? significance_json(made.difference(*made.runner_up))
                                        : ordered_json(nullptr)},
          {"not_significantly_different", names_json(made, made.similar())},
          {"order", order},
          {"over_budget", over},
          {"none_eligible", made.none_eligible},
          {"frontier", frontier},
          {"texts", scope.texts},
          {"tokens", scope.tokens},
          {"samples", scope.samples},
          {"note", scope.note},
          {"text", recommendation_text(made)},
          {"warnings", recommendation_warnings(made)}};
}

ordered_json recommendations_json(Recommendations made) {
  auto list = ordered_json::array();
  for (const Recommendation& one : made) list.push_back(recommendation_json(one));
  return list;
}

namespace {

Difference difference_from(const JsonFields& fields) {
  return {.mean = fields.number_or_nan("mean"),
          .interval = {fields.number_or_nan("low"), fields.number_or_nan("high")}};
}

Candidate candidate_from(const JsonFields& fields, double sign) {
  return {.name = fields.text("policy"),
          .error = sign * fields.number_or_nan("mean"),
          .memory = {.mean = fields.number("kv_bytes_mean"),
                     .peak = fields.number("kv_bytes_peak"),
                     .state = fields.number("state_bytes")}};
}

Recommendation recommendation_from(const JsonFields& fields) {
  Recommendation made{.scope = {.budget = fields.text("budget"),
                                .budget_bytes = fields.number("budget_bytes"),
                                .full_bytes = fields.number("full_bytes"),
                                .metric = fields.text("metric"),
                                .higher_is_better = fields.text("better") == "higher",
                                .texts = fields.whole("texts"),
                                .tokens = fields.whole("tokens"),
                                .samples = fields.whole("samples"),
                                .note = fields.text("note")}};
  made.none_eligible = fields.flag("none_eligible", false);
  const double sign = made.scope.higher_is_better ? -1 : 1;
  const std::string choice = fields.text("choice"),
                    runner_up = fields.has("runner_up") ? fields.text("runner_up") : "";
  std::optional<std::size_t> chosen;
  for (const JsonFields& one : fields.objects("order")) {
    const std::size_t c = made.candidates.size();
    made.candidates.push_back(candidate_from(one, sign));
    made.order.push_back(c);
    made.from_lowest.push_back(difference_from(one.object("from_lowest")));
    made.from_choice.push_back(difference_from(one.object("from_choice")));
    // In files of older versions, several candidates may have the same name.
    const std::string& name = made.candidates[c].name;
    if (name == choice && !chosen)
      chosen = c;
    else if (fields.has("runner_up") && name == runner_up && !made.runner_up)
      made.runner_up = c;
  }
  made.choice = chosen.value_or(0);
  if (made.order.empty()) fields.refuse("order", "it should hold candidates");
  for (const JsonFields& one : fields.objects("over_budget")) {
    made.over_budget.push_back(made.candidates.size());
    made.candidates.push_back(candidate_from(one, sign));
  }
  made.for_memory = made.choice != made.order.front();
  return made;
}

}  // namespace

std::vector<Recommendation> recommendations_from(const JsonFields& fields, std::string_view key) {
  std::vector<Recommendation> made;
  for (const JsonFields& one : fields.objects(key)) made.push_back(recommendation_from(one));
  return made;
}

Recommendation recommendation_in(const JsonFields& fields, std::string_view key) {
  return recommendation_from(fields.object(key));
}

std::optional<std::size_t> counterpart(const MetricTable& metric_table, std::size_t series,
                                       std::string_view policy) {
  const Series& like = metric_table.series()[series];
  std::optional<std::size_t> found;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& other = metric_table.series()[s];
    if (other.policy != policy || other.prefill != like.prefill) continue;
    if (!found || (metric_table.series()[*found].positions != like.positions &&
                   other.positions == like.positions))
      found = s;
  }
  return found;
}

std::string oracle_sentence(const MetricTable& metric_table, const MetricInfo& metric) {
  std::vector<std::string> budgets;
  for (const BudgetColumn& budget : metric_table.budgets()) {
    const Ranking ranking = rank_policies(metric_table, budget.text, metric, Frontier::skip);
    if (ranking.empty()) continue;
    const std::size_t choice = ranking.ranked[ranking.winner].series;
    // A policy with `prompt` keeps more tokens than an oracle at the same budget.
    if (keeps_prompt(metric_table.series()[choice].params)) continue;
    const auto oracle = counterpart(metric_table, choice, kOracleAttention);
    const auto own = metric_table.average(choice, budget.text, metric.name);
    const auto bound =
        oracle ? metric_table.average(*oracle, budget.text, metric.name) : std::nullopt;
    if (own && bound &&
        (metric.higher_is_better ? own->mean > bound->mean : own->mean < bound->mean))
      budgets.push_back(budget.text);
  }
  if (budgets.empty()) return "";
  return fmt::format(
      "At {} the choice is better than oracle_attention. oracle_attention is a heuristic that "
      "evicts the "
      "token with the least future attention; it does not optimize {}, so it is not a bound.",
      join_names(budgets), metric.label);
}

ordered_json page_json(Recommendations made, const ColourOf& colour_of, std::string_view name) {
  auto budgets = recommendations_json(made);
  for (ordered_json& one : budgets) one["colour"] = colour_of(one["choice"].get<std::string>());
  return {{"name", name},
          {"budgets", budgets},
          {"notes", notes_of(made, false)},
          {"warnings", recommendation_warnings(made)}};
}

}  // namespace kvlab
