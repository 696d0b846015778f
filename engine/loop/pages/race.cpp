#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>

#include "engine/loop/pages/pages.hpp"
#include "engine/loop/policy_file.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMostDrawn = 8;  // so that the answer fits one screen
constexpr const char* kRaceFootnote =
    "The open loop ordered the grid; the first of it raced in the closed loop, over more and more "
    "text. Whoever the 95% interval of the paired difference from the leader puts behind leaves. "
    "Paired: over the same tokens. KL of two rounds is of different texts.";

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
        fmt::format("The last round: how far each is behind its leader, with the 95% interval. "
                    "What reaches zero cannot be told apart.{}",
                    rounds_.back().size() > kMostDrawn
                        ? fmt::format(" The first {} of {}.", kMostDrawn, rounds_.back().size())
                        : ""),
        {behind_figure()}, data);
    // The answer and its figure fill one screen; the rounds follow.
    return html_page("kvlab: " + title,
                     html_header("kvlab tune", escape(title), "", answer(), "blue", "") + drawn +
                         answers_table() + scores_table() + rounds_table() + open_loop(),
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

  /// Who won, at what budget, by how much, on what.
  std::string answer() const {
    const auto& last = rounds_.back();
    std::string text = fmt::format(
        "At a budget of {} tokens <strong>{}</strong> was chosen: KL {} nats to the full cache, "
        "over {}.",
        file_.whole("budget"), escape(brief_policy(winner_.policy)), figure_text(winner_.kl),
        on_what());
    if (run_.has("truths")) text += " " + truths();
    if (run_.has("verdict"))
      if (const JsonFields verdict = run_.object("verdict"); verdict.has("warnings"))
        for (const json& warning : verdict.list("warnings"))
          text += fmt::format(" Beware: {}.",
                              escape(warning.is_string() ? warning.get<std::string>() : "?"));
    if (in_round(rounds_.size() - 1, winner_.policy) == nullptr) return text;
    std::vector<std::string> tied;
    for (const Place& place : last)
      if (place.policy != winner_.policy && !place.told_apart)
        tied.push_back(escape(brief_policy(place.policy)));
    if (tied.empty() && last.size() > 1)
      text += fmt::format(" It is ahead of all {} others of the last round.", last.size() - 1);
    else if (tied.size() > 4)
      text += fmt::format(" KL cannot tell it from {} others of the last {}.", tied.size(),
                          last.size());
    else if (!tied.empty())
      text += " KL cannot tell it from " + join_names(tied) + ".";
    const auto loser = std::ranges::max_element(last, {}, &Place::kl);
    if (loser->kl > winner_.kl)
      text += fmt::format(" The last of that round, {}, has {} times its KL.",
                          escape(brief_policy(loser->policy)), figure_text(loser->kl / winner_.kl));
    return text;
  }

  /// Who is named for what, and why one is deployed.
  std::string truths() const {
    const JsonFields truths = run_.object("truths");
    const auto name = [&](const char* key) {
      return truths.has(key) ? escape(brief_policy(truths.text(key))) : "nobody";
    };
    return fmt::format("For distribution: {}; for answers: {}. Why: {}.", name("distribution"),
                       name("answers"), escape(truths.text("why")));
  }

  /// What the finalists answered, and those that are named beside the full cache.
  std::string answers_table() const {
    if (!run_.has("truths")) return "";
    const JsonFields truths = run_.object("truths");
    std::vector<Column> columns{{"policy", false}, {"KL of least"}};
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
                        : html_section("What they answer",
                                       "Share of right answers; the question comes after the "
                                       "eviction. KL is over that of the least.",
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
                  .x = {.title = "KL behind the leader, nats"},
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
                                 .note = last[i].told_apart ? "behind" : "not told apart"}}});
    }
    return figure;
  }

  /// One row a policy: its KL in each round, and when it left.
  std::string rounds_table() const {
    std::vector<Column> columns{{"policy", false}};
    for (std::size_t r = 0; r < rounds_.size(); ++r)
      columns.push_back({fmt::format("KL, round {}", r + 1)});
    columns.insert(columns.end(), {{"behind the leader"}, {"95% from"}, {"to"}, {"then", false}});
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
        row.emplace_back(last + 1 < rounds_.size()
                             ? fmt::format("left after round {}: {}", last + 1, escape(place.fate))
                             : escape(place.fate));
        rows.push_back(std::move(row));
      }
    return html_section("Who stayed and who left",
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
        "The open loop’s order", "",
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
