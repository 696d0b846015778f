#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>

#include "engine/evaluation/pages/pages.hpp"
#include "engine/evaluation/policy_file.hpp"
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

constexpr std::size_t kMostDrawn = 8;  // so that the answer fits on one screen
constexpr const char* kHalvingFootnote =
    "Offline replay ordered the sweep; the first configurations of that order were evaluated end "
    "to end, in rounds with more and more text. A configuration is eliminated when the 95% CI of "
    "its paired "
    "KL difference from the leader is entirely above zero. KL values of different rounds are "
    "measured on different amounts of text, so do not compare them.";

/// One policy in one round.
struct Standing {
  std::string policy, fate;
  double kl, mean, low, high;  ///< in nats; difference from the round's leader with its interval
  bool significantly_different;
};

class HalvingPage {
 public:
  HalvingPage(const json& top, const std::string& file)
      : file_(top, file), run_(file_.object("run")) {
    if (!run_.has("rounds") || run_.list("rounds").empty())
      throw std::runtime_error(
          file + ": holds no successive halving; it should be a policy file made by `kvlab tune`");
    for (const JsonFields& fields : run_.objects("rounds")) {
      rounds_.emplace_back();
      for (const JsonFields& one : fields.objects("standings")) {
        const JsonFields behind = one.object("behind");
        rounds_.back().push_back({one.text("policy"), one.text("fate"), one.number("kl"),
                                  behind.number_or_nan("mean"), behind.number_or_nan("low"),
                                  behind.number_or_nan("high"),
                                  behind.flag("significantly_different", false)});
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
    // The answer and its figure fill one screen. The rounds follow below.
    return html_page("kvlab: " + title,
                     html_front("kvlab tune", escape(title), "", answer()) + drawn +
                         html_section("Recommendation by KL", "", recommended()) +
                         task_accuracy_table() + scores_table() + rounds_table() + offline_replay(),
                     data);
  }

 private:
  /// The deployed policy, as in its last round.
  const Standing& winner(const std::filesystem::path& file) const {
    std::string text = file_.text("policy");
    try {
      text = read_policy_file(file).cache.policy.text();
    } catch (const std::exception&) {  // the policy is a header that is not compiled here, so
                                       // search by its name
    }
    for (std::size_t round = rounds_.size();
         round-- > 0;)  // the best by task accuracy may be eliminated early
      for (const Standing& standing : rounds_[round])
        if ((standing.policy + ":").starts_with(text + ":")) return standing;
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

  /// The choice, its budget, the criterion and the texts; then the recommendation by KL.
  std::string answer() const {
    std::string text = fmt::format(
        "At a budget of {} tokens <strong>{}</strong> was chosen: KL {} nats to the full cache, "
        "over {}.",
        file_.whole("budget"), escape(brief_policy(winner_.policy)), number_text(winner_.kl),
        on_what());
    if (run_.has("criteria")) text += " " + criteria();
    return fmt::format("<p class=\"answer\" style=\"--accent:var(--blue)\">{}</p>\n", text);
  }

  std::string recommended() const {
    if (!run_.has("recommendation")) return "";
    const Recommendation made = recommendation_in(run_, "recommendation");
    return recommendations_html(
        {&made, 1}, "kvlab generate --model DIR --prompt TEXT --policy-file policy.json",
        [](const std::string&) { return std::string(); });
  }

  /// The best policy by each criterion, and why one is deployed.
  std::string criteria() const {
    const JsonFields criteria = run_.object("criteria");
    const auto name = [&](const char* key) {
      return criteria.has(key) ? escape(brief_policy(criteria.text(key)))
                               : std::string("none (tasks skipped)");
    };
    return fmt::format("Best by KL: {}. Best by task accuracy: {}. Reason: {}.",
                       name("distribution"), name("task_accuracy"), escape(criteria.text("why")));
  }

  /// Task accuracy of the finalists and the full cache.
  std::string task_accuracy_table() const {
    if (!run_.has("criteria")) return "";
    const JsonFields criteria = run_.object("criteria");
    std::vector<Column> columns{{"policy", false}, {"KL / lowest KL"}};
    for (const JsonFields& evaluated : criteria.objects("evaluated")) {
      columns.push_back({fmt::format("{}, {} words, {} samples", escape(evaluated.text("task")),
                                     evaluated.whole("words"), evaluated.whole("samples"))});
      columns.insert(columns.end(), {{"95% from"}, {"to"}});
    }
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : criteria.objects("policies")) {
      if (!one.has("task_accuracy")) continue;
      rows.push_back({escape(brief_policy(one.text("policy"))),
                      number_cell(one.number_or_nan("kl_of_least"))});
      for (const JsonFields& answer : one.objects("task_accuracy")) {
        for (const char* key : {"right", "low", "high"})
          rows.back().push_back(number_cell(answer.number_or_nan(key)));
      }
    }
    return rows.empty() ? ""
                        : html_section("Task accuracy",
                                       "Share of right answers. The question comes after the "
                                       "eviction. KL is given as a multiple of the lowest.",
                                       table(columns, rows));
  }

  std::string scores_table() const {
    if (!run_.has("scores")) return "";
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& score : run_.objects("scores")) {
      rows.push_back({escape(brief_policy(score.text("policy")))});
      for (const char* key : {"perplexity", "kl", "kl_deviation", "same_first", "tokens"})
        rows.back().push_back(number_cell(score.number_or_nan(key)));
    }
    std::string note;
    if (run_.has("step")) {
      const JsonFields step = run_.object("step").object("milliseconds");
      note = fmt::format("A decoded token takes {} ms; with the full cache {} ms.",
                         number_text(step.number("deployed")), number_text(step.number("full")));
    }
    return html_section("Beside the full cache", note,
                        table({{"policy", false},
                               {"perplexity"},
                               {"KL, nats"},
                               {"standard deviation over texts"},
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
      figure.series.push_back(
          {figure.y.names.back(),
           styles[i],
           {{.x = last[i].mean,
             .y = static_cast<double>(i),
             .x_low = last[i].low,
             .x_high = last[i].high,
             .note = last[i].significantly_different ? "significant" : "not significant"}}});
    }
    return figure;
  }

  /// A row for each policy: its KL in each round, and when it was eliminated.
  std::string rounds_table() const {
    std::vector<Column> columns{{"policy", false}};
    for (std::size_t r = 0; r < rounds_.size(); ++r)
      columns.push_back({fmt::format("KL, round {}", r + 1)});
    columns.insert(columns.end(), {{"minus the leader"}, {"95% from"}, {"to"}, {"then", false}});
    std::vector<std::vector<Cell>> rows;
    for (std::size_t last = rounds_.size(); last-- > 0;)
      for (const Standing& standing : rounds_[last]) {
        if (last + 1 < rounds_.size() && in_round(last + 1, standing.policy)) continue;
        std::vector<Cell> row{escape(brief_policy(standing.policy))};
        for (std::size_t r = 0; r < rounds_.size(); ++r) {
          const Standing* const own = in_round(r, standing.policy);
          row.push_back(own ? number_cell(own->kl) : Cell(""));
        }
        const bool leads = &standing == &rounds_[last].front();
        row.push_back(leads ? Cell("leads") : number_cell(standing.mean));
        row.push_back(leads ? Cell("") : number_cell(standing.low));
        row.push_back(leads ? Cell("") : number_cell(standing.high));
        row.emplace_back(last + 1 < rounds_.size() ? fmt::format("eliminated after round {}: {}",
                                                                 last + 1, escape(standing.fate))
                                                   : escape(standing.fate));
        rows.push_back(std::move(row));
      }
    return html_section("Rounds of successive halving",
                        fmt::format("{} Ended: {}.", kHalvingFootnote, escape(run_.text("ended"))),
                        table(columns, rows));
  }

  const Standing* in_round(std::size_t round, const std::string& policy) const {
    const auto found = std::ranges::find(rounds_[round], policy, &Standing::policy);
    return found == rounds_[round].end() ? nullptr : &*found;
  }

  std::string offline_replay() const {
    const JsonFields open = run_.object("offline_replay");
    const std::string metric = open.text("metric");
    std::vector<std::vector<Cell>> rows;
    for (const JsonFields& one : open.objects("ranking")) {
      rows.push_back(
          {escape(brief_policy(one.text("policy"))), number_cell(one.number_or_nan(metric))});
    }
    return html_section(
        "Order by offline replay", "",
        fmt::format("<details><summary>all {} configurations</summary>{}</details>", rows.size(),
                    table({{"policy", false}, {escape(metric)}}, rows)));
  }

  JsonFields file_, run_;
  std::vector<std::vector<Standing>> rounds_;
  Standing winner_;
};

}  // namespace

std::string halving_page(const std::filesystem::path& policy_file) {
  const std::string file = policy_file.string();
  const json top = parse_result_json(read_text_file(file, std::size_t{64} << 20), file);
  return HalvingPage(top, file).html();
}

}  // namespace kvlab
