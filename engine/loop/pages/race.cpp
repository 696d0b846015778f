#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <stdexcept>

#include "engine/loop/pages/pages.hpp"
#include "engine/loop/pages/scores.hpp"
#include "sim/report/html.hpp"
#include "sim/report/interactive/vega.hpp"
#include "sim/report/page.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr const char* kFootnote =
    "The open loop ordered the grid; the first of it raced in the closed loop, over more and more "
    "text. Whoever the 95% interval of the paired difference from the leader puts behind leaves. "
    "Paired: over the same tokens.";

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : "?";
}

class RacePage {
 public:
  RacePage(const json& top, const std::string& file) : file_(top, file), run_(file_.object("run")) {
    if (!run_.has("rounds"))
      throw std::runtime_error(file +
                               ": holds no race; it should be a policy file made by `kvlab tune`");
  }

  /// `fixed`: without what needs a script.
  std::string html(bool fixed) const {
    const std::string model = file_.object("model").text("name");
    const std::string title = "Which policy for " + model + "?";
    const auto vega = fixed ? std::nullopt : vega_script();
    std::optional<Explorer> explorer;
    if (vega) explorer = explorer_of(as_scores(model), "The race, round by round", *vega);
    return html_page(
        "kvlab: " + title,
        html_header("kvlab tune", escape(title), context(), answer(), "blue", kFootnote) +
            (explorer ? explorer->sections : "") + rounds() + open_loop(),
        explorer ? explorer->scripts : "");
  }

 private:
  std::string context() const {
    std::vector<std::string> texts;
    for (const json& text : run_.list("texts"))
      texts.push_back(escape(JsonFields(text, run_.where() + ": texts").text("name")));
    return fmt::format("{} configurations in the order of {}, then {} rounds over {}. Ended: {}.",
                       run_.object("open_loop").list("ranking").size(),
                       escape(run_.object("open_loop").text("metric")), run_.list("rounds").size(),
                       join_names(texts), escape(run_.text("ended")));
  }

  std::string answer() const {
    std::vector<std::string> ties;
    for (const json& tie : run_.list("ties")) ties.push_back(escape(text_of(tie)));
    std::string text = fmt::format("<strong>{}</strong> was chosen", escape(file_.text("policy")));
    if (!ties.empty() && ties.size() <= 4)
      text += ". In KL it cannot be told apart from " + join_names(ties);
    if (ties.size() > 4)
      text += fmt::format(
          ". In KL it cannot be told apart from {} others: those of the last round below whose "
          "interval holds zero",
          ties.size());
    return text + ".";
  }

  /// KL by round, as a figure shows it: rounds in the place of budgets.
  ScoreSet as_scores(const std::string& model) const {
    ScoreSet set{
        .kind = "race",
        .groups = {{model, {}}},
        .metrics = {{"kl", "KL, nats", false, true}},
        .headline = "kl",
        .note = "Closed loop. The last round has run the most text; who has left is not in it."};
    std::uint32_t number = 0;
    for (const json& round : run_.list("rounds")) {
      ++number;
      const JsonFields fields(round, run_.where() + ": rounds");
      for (const json& entry : fields.list("standings")) {
        const JsonFields one(entry, fields.where() + ": standings");
        const std::string policy = one.text("policy");
        const std::size_t colon = std::min(policy.find(':'), policy.size());
        ResultRow row{.trace = "all",
                      .policy = policy.substr(0, colon),
                      .params = policy.substr(std::min(colon + 1, policy.size())),
                      .budget = fmt::format("round {}", number),
                      .budget_tokens = number};
        row.prefill = "dense", row.positions = "original";
        row.metric = "kl", row.value = one.number("kl"), row.standard_error = NAN;
        set.groups.front().rows.push_back(std::move(row));
      }
    }
    return set;
  }

  std::string rounds() const {
    std::string html;
    std::size_t number = 0;
    for (const json& round : run_.list("rounds")) {
      const JsonFields fields(round, run_.where() + ": rounds");
      std::vector<std::vector<std::string>> rows;
      for (const json& entry : fields.list("standings")) {
        const JsonFields one(entry, fields.where() + ": standings");
        const JsonFields behind = one.object("behind");
        rows.push_back({escape(one.text("policy")), figure_text(one.number("kl")),
                        rows.empty() ? "leads" : figure_text(behind.number("mean")),
                        rows.empty() ? ""
                                     : figure_text(behind.number("low")) + " to " +
                                           figure_text(behind.number("high")),
                        escape(one.text("fate"))});
      }
      html += table({{"policy", false}, {"KL"}, {"behind the leader"}, {"95%"}, {"then", false}},
                    rows, fmt::format("round {}", ++number));
    }
    return html_section("Who stayed and who left", "", html);
  }

  std::string open_loop() const {
    const JsonFields open = run_.object("open_loop");
    const std::string metric = open.text("metric");
    std::vector<std::vector<std::string>> rows;
    for (const json& entry : open.list("ranking")) {
      const JsonFields one(entry, open.where() + ": ranking");
      rows.push_back({escape(one.text("policy")), figure_text(one.number(metric))});
    }
    return html_section("The open loop’s order", "",
                        table({{"policy", false}, {escape(metric)}}, rows));
  }

  JsonFields file_, run_;
};

}  // namespace

std::string race_page(const std::filesystem::path& policy_file, bool fixed) {
  const std::string file = policy_file.string();
  const json top = parse_json(read_text_file(file, std::size_t{64} << 20), file);
  return RacePage(top, file).html(fixed);
}

}  // namespace kvlab
