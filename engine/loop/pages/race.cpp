#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>

#include "engine/loop/pages/pages.hpp"
#include "engine/loop/policy_file.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMostDrawn = 8;  // so that the answer fits one screen
constexpr const char* kRaceFootnote =
    "Offline replay ordered the sweep; its first configurations were evaluated end to end, in "
    "rounds over more and more text. A configuration is eliminated when the 95% CI of its paired "
    "KL difference from the leader is entirely above zero. KL of two rounds is of different texts.";

/// One policy in one round.
struct Place {
  std::string policy, fate;
  double kl, mean, low, high;  ///< nats; behind the round's leader
  bool told_apart;
};

class RacePage {
 public:
  RacePage(const json& top, const std::string& file) : file_(top, file), run_(file_.object("run")) {
    if (!run_.has("rounds") || run_.list("rounds").empty())
      throw std::runtime_error(file +
                               ": holds no race; it should be a policy file made by `kvlab tune`");
    for (const JsonFields& fields : run_.objects("rounds")) {
      rounds_.emplace_back();
      for (const JsonFields& one : fields.objects("standings")) {
        const JsonFields behind = one.object("behind");
        rounds_.back().push_back({one.text("policy"), one.text("fate"), one.number("kl"),
                                  behind.number_or_nan("mean"), behind.number_or_nan("low"),
                                  behind.number_or_nan("high"), behind.flag("told_apart", false)});
      }
      if (rounds_.back().empty())
        throw std::runtime_error(fields.where() + ": standings: empty; it should hold policies");
    }
    winner_ = winner(file);
  }

  std::string html() const {
    const std::string title = "Which policy for " + file_.object("model").text("name") + "?";
    nlohmann::ordered_json data;
    const std::string drawn = figures_section(
        "By how much",
        fmt::format("The last round: the KL of each minus that of the leader, with the 95% "
                    "interval. A difference whose interval includes zero is not significant.{}",
                    rounds_.back().size() > kMostDrawn
                        ? fmt::format(" The first {} of {}.", kMostDrawn, rounds_.back().size())
                        : ""),
        {behind_figure()}, data);
    // The answer and its figure fill one screen; the rounds follow.
    return html_page("kvlab: " + title,
                     html_front("kvlab tune", escape(title), "", answer()) + drawn +
                         html_section("Recommendation by KL", "", recommended()) + answers_table() +
                         scores_table() + rounds_table() + open_loop(),
                     data);
  }

 private:
  /// The policy that the file deploys, as its last round has it.
  const Place& winner(const std::filesystem::path& file) const {
    std::string text = file_.text("policy");
    try {
      text = read_policy_file(file).cache.policy.text();
    } catch (const std::exception&) {  // of a header that is not compiled here: by its name alone
    }
    for (std::size_t round = rounds_.size(); round-- > 0;)  // who answers best may have left early
      for (const Place& place : rounds_[round])
        if ((place.policy + ":").starts_with(text + ":")) return place;
    return rounds_.back().front();
  }

  std::string on_what() const {
    std::vector<std::string> names;
    std::uint64_t tokens = 0;
    for (const JsonFields& fields : run_.objects("texts")) {
      names.push_back(escape(fields.text("name")));
      tokens += fields.whole("tokens") - fields.whole("prompt_tokens");
    }
    return fmt::format("{} decoded tokens of {}", tokens, join_names(names));
  }

  /// What was chosen, at what budget, by what, on what; then the recommendation by KL.
  std::string answer() const {
    std::string text = fmt::format(
        "At a budget of {} tokens <strong>{}</strong> was chosen: KL {} nats to the full cache, "
        "over {}.",
        file_.whole("budget"), escape(brief_policy(winner_.policy)), figure_text(winner_.kl),
        on_what());
    if (run_.has("truths")) text += " " + truths();
    return fmt::format("<p class=\"answer\" style=\"--accent:var(--blue)\">{}</p>\n", text);
  }

  std::string recommended() const {
    if (!run_.has("recommendation")) return "";
    const Recommendation made = recommendation_in(run_, "recommendation");
    return recommendations_html(
        {&made, 1}, "kvlab generate --model DIR --prompt TEXT --policy-file policy.json",
        [](const std::string&) { return std::string(); });
  }

  /// What is best by each criterion, and why one is deployed.
  std::string truths() const {
    const JsonFields truths = run_.object("truths");
    const auto name = [&](const char* key) {
      return truths.has(key) ? escape(brief_policy(truths.text(key)))
                             : std::string("none (tasks skipped)");
    };
    return fmt::format("Best by KL: {}. Best by task accuracy: {}. Reason: {}.",
                       name("distribution"), name("answers"), escape(truths.text("why")));
  }

  /// What the finalists answered, and those that are named beside the full cache.
  std::string answers_table() const {
    if (!run_.has("truths")) return "";
    const JsonFields truths = run_.object("truths");
    std::vector<Column> columns{{"policy", false}, {"KL / lowest KL"}};
    for (const JsonFields& asked : truths.objects("asked")) {
      columns.push_back({fmt::format("{}, {} words, {} draws", escape(asked.text("task")),
                                     asked.whole("words"), asked.whole("draws"))});
      columns.insert(columns.end(), {{"95% from"}, {"to"}});
    }
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : truths.objects("policies")) {
      if (!one.has("answers")) continue;
      rows.push_back({escape(brief_policy(one.text("policy"))),
                      figure_cell(one.number_or_nan("kl_of_least"))});
      for (const JsonFields& answer : one.objects("answers")) {
        for (const char* key : {"right", "low", "high"})
          rows.back().push_back(figure_cell(answer.number_or_nan(key)));
      }
    }
    return rows.empty() ? ""
                        : html_section("Task accuracy",
                                       "Share of right answers. The question comes after the "
                                       "eviction. KL is relative to the lowest.",
                                       table(columns, rows));
  }

  std::string scores_table() const {
    if (!run_.has("scores")) return "";
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& score : run_.objects("scores")) {
      rows.push_back({escape(brief_policy(score.text("policy")))});
      for (const char* key : {"perplexity", "kl", "kl_deviation", "same_first", "tokens"})
        rows.back().push_back(figure_cell(score.number_or_nan(key)));
    }
    std::string note;
    if (run_.has("step")) {
      const JsonFields step = run_.object("step").object("milliseconds");
      note = fmt::format("A decoded token takes {} ms, under the full cache {} ms.",
                         figure_text(step.number("deployed")), figure_text(step.number("full")));
    }
    return html_section("Beside the full cache", note,
                        table({{"policy", false},
                               {"perplexity"},
                               {"KL, nats"},
                               {"deviation of texts"},
                               {"top-1"},
                               {"scored tokens"}},
                              rows));
  }

  Figure behind_figure() const {
    Figure figure{.name = "behind",
                  .title = fmt::format("budget {} tokens", file_.whole("budget")),
                  .x = {.title = "KL minus the leader’s, nats"},
                  .joined = false};
    std::vector<Series> series;
    const auto& last = rounds_.back();
    for (std::size_t i = 0; i < std::min(kMostDrawn, last.size()); ++i)
      series.push_back({.policy = last[i].policy.substr(0, last[i].policy.find(':'))});
    const auto styles = styles_of(series);
    for (std::size_t i = 0; i < series.size(); ++i) {
      figure.y.names.push_back(brief_policy(last[i].policy));
      figure.series.push_back({figure.y.names.back(),
                               styles[i],
                               {{.x = last[i].mean,
                                 .y = static_cast<double>(i),
                                 .x_low = last[i].low,
                                 .x_high = last[i].high,
                                 .note = last[i].told_apart ? "significant" : "not significant"}}});
    }
    return figure;
  }

  /// One row a policy: its KL in each round, and when it left.
  std::string rounds_table() const {
    std::vector<Column> columns{{"policy", false}};
    for (std::size_t r = 0; r < rounds_.size(); ++r)
      columns.push_back({fmt::format("KL, round {}", r + 1)});
    columns.insert(columns.end(), {{"minus the leader"}, {"95% from"}, {"to"}, {"then", false}});
    std::vector<std::vector<Cell>> rows;
    for (std::size_t last = rounds_.size(); last-- > 0;)
      for (const Place& place : rounds_[last]) {
        if (last + 1 < rounds_.size() && in_round(last + 1, place.policy)) continue;
        std::vector<Cell> row{escape(brief_policy(place.policy))};
        for (std::size_t r = 0; r < rounds_.size(); ++r) {
          const Place* const own = in_round(r, place.policy);
          row.push_back(own ? figure_cell(own->kl) : Cell(""));
        }
        const bool leads = &place == &rounds_[last].front();
        row.push_back(leads ? Cell("leads") : figure_cell(place.mean));
        row.push_back(leads ? Cell("") : figure_cell(place.low));
        row.push_back(leads ? Cell("") : figure_cell(place.high));
        row.emplace_back(last + 1 < rounds_.size() ? fmt::format("eliminated after round {}: {}",
                                                                 last + 1, escape(place.fate))
                                                   : escape(place.fate));
        rows.push_back(std::move(row));
      }
    return html_section("Rounds of successive halving",
                        fmt::format("{} Ended: {}.", kRaceFootnote, escape(run_.text("ended"))),
                        table(columns, rows));
  }

  const Place* in_round(std::size_t round, const std::string& policy) const {
    const auto found = std::ranges::find(rounds_[round], policy, &Place::policy);
    return found == rounds_[round].end() ? nullptr : &*found;
  }

  std::string open_loop() const {
    const JsonFields open = run_.object("open_loop");
    const std::string metric = open.text("metric");
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : open.objects("ranking")) {
      rows.push_back(
          {escape(brief_policy(one.text("policy"))), figure_cell(one.number_or_nan(metric))});
    }
    return html_section(
        "Order by offline replay", "",
        fmt::format("<details><summary>all {} configurations</summary>{}</details>", rows.size(),
                    table({{"policy", false}, {escape(metric)}}, rows)));
  }

  JsonFields file_, run_;
  std::vector<std::vector<Place>> rounds_;
  Place winner_;
};

}  // namespace

std::string race_page(const std::filesystem::path& policy_file) {
  const std::string file = policy_file.string();
  const json top = parse_json(read_text_file(file, std::size_t{64} << 20), file);
  return RacePage(top, file).html();
}

}  // namespace kvlab
